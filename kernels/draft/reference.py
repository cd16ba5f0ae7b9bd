"""Torch reference of the draft ops; also the CPU production path."""

import torch
from torch import Tensor

from dspark.kernels.collective import Group, tp_argmax
from dspark.kernels.common import rng
from dspark.kernels.common.argmax import pack_argmax, token_of
from dspark.kernels.draft.types import Confidence, MarkovBlock
from dspark.kernels.linear import Bf16Weight
from dspark.kernels.linear.reference import bf16_linear


def markov_block(
    base: Tensor,
    prev: Tensor,
    w1: Tensor,
    w2: Bf16Weight,
    *,
    temperature: Tensor | None = None,
    greedy: Tensor | None = None,
    seed: Tensor | None = None,
    prefix_len: Tensor | None = None,
    vocab_start: int = 0,
    group: Group = None,
) -> MarkovBlock:
    """Draw a block of drafts, each conditioned on the one before (checkpoint `mtp.2.markov_*`).

    For k = 0..gamma-1: `l_k = base[:, k] + w1[d_k] @ w2.T` with d_0 = prev, and d_{k+1} is
    argmax(l_k) on greedy rows, else a sample of softmax(l_k / temperature). Ties go to the
    smaller id; a row without a finite logit proposes token 0.

    Args:
        base: f32 [R, gamma, shard] logits of the draft block, this rank's vocabulary shard.
        prev: i64 [R] the last emitted token.
        w1: bf16 or f32 [V, rank], replicated. w2: [shard, rank].
        temperature: f32 [R], None = all rows greedy. greedy: bool [R], None = no row greedy.
        seed: i64 [R] per request; prefix_len: i64 [R] position of `prev`. Both are needed to
            sample: draft k of a request uses a stream of its own, named by seed, position and k.
        vocab_start: first token id of this rank's shard. group: the ranks that share the
            vocabulary; every rank returns the same tokens.

    Raises:
        ValueError: when sampling is asked for without seed and prefix_len.
    """
    gamma, shard = base.shape[1:]
    token_ids = vocab_start + torch.arange(shard, device=base.device)
    tokens, corrected = [], []
    for k in range(gamma):
        logits = base[:, k] + bf16_linear(w1[prev], w2, torch.float32)
        keys = logits
        if temperature is not None:
            assert seed is not None
            assert prefix_len is not None
            stream = rng.stream(seed, prefix_len + k + 1, rng.DRAFT + k)
            keys = race_keys(logits, temperature, stream, token_ids)
            if greedy is not None:
                keys = torch.where(greedy[:, None], logits, keys)
        prev = token_of(tp_argmax(pack_argmax(keys, vocab_start), group))
        tokens.append(prev)
        corrected.append(logits)
    return MarkovBlock(torch.stack(tokens, 1), torch.stack(corrected, 1))


def race_keys(logits: Tensor, temperature: Tensor, stream: rng.Stream, token_ids: Tensor) -> Tensor:
    """Keys [R, N] whose argmax is a sample of softmax(logits / temperature).

    Token t finishes an exponential race at E_t / exp(l_t / T); the first to finish is token t
    with probability proportional to exp(l_t / T). The key is minus the log of that time.
    """
    each = rng.Stream(stream.a[:, None], stream.b[:, None])
    noise = rng.exponential(each, token_ids)
    return logits / temperature.clamp(min=1e-6)[:, None] - torch.log(noise)


def confidence(
    hidden: Tensor, prev_tokens: Tensor, w1: Tensor, proj: Tensor, temperature: Tensor
) -> Confidence:
    """Chance that each draft is accepted (checkpoint `mtp.2.confidence_head.*`).

    `logit = proj . [hidden, w1[prev_token]]`, `probability = sigmoid(logit / temperature)`, in
    fp32. A NaN logit gives probability 0.

    Args:
        hidden: bf16 or f32 [R, gamma, Hd], the draft output before its final norm.
        prev_tokens: i64 [R, gamma], the token each draft followed: prev, d_1..d_{gamma-1}.
        w1: bf16 or f32 [V, rank]. proj: f32 [Hd + rank].
        temperature: f32 [gamma], ones when uncalibrated.
    """
    features = torch.cat([hidden.double(), w1[prev_tokens].double()], -1)
    logit = (features @ proj.double()).float()
    probability = torch.sigmoid(logit / temperature).nan_to_num(nan=0.0)
    return Confidence(probability, logit)
