"""Torch reference of the draft ops; also the CPU production path."""

import torch
from torch import Tensor

from dspark.kernels.collective import Group, tp_argmax
from dspark.kernels.common import rng
from dspark.kernels.common.argmax import pack_argmax, token_of
from dspark.kernels.draft.types import Confidence, DraftSampling, MarkovBlock
from dspark.kernels.linear import Bf16Weight
from dspark.kernels.linear.reference import bf16_linear
from dspark.kernels.sampling.reference import noised


def markov_block(
    base: Tensor,
    prev: Tensor,
    w1: Tensor,
    w2: Bf16Weight,
    *,
    sampling: DraftSampling | None = None,
    keep_logits: bool = True,
    vocab_start: int = 0,
    group: Group = None,
) -> MarkovBlock:
    """Draw a block of drafts, each conditioned on the one before (checkpoint `mtp.2.markov_*`).

    For k = 0..gamma-1: `l_k = base[:, k] + w1[d_k] @ w2.T` with d_0 = prev, and d_{k+1} is the
    argmax of l_k + temperature * noise: a sample of softmax(l_k / temperature), or the argmax of
    l_k at temperature 0. Ties go to the smaller id; a row without a finite logit proposes token 0.

    The noise of a seeded row is the target's own at that position (`sampling.choose`), so that the
    draft guesses what the target will choose. Other rows are judged by rejection, which is exact
    only if nothing but the proposal depends on their noise: draft k has a stream of its own.

    Args:
        base: f32 [R, gamma, shard] logits of the draft block, this rank's vocabulary shard.
        prev: i64 [R] the last emitted token.
        w1: bf16 or f32 [V, rank], replicated. w2: [shard, rank].
        sampling: None = all rows greedy.
        keep_logits: whether the corrected logits are wanted.
        vocab_start: first token id of this rank's shard. group: the ranks that share the
            vocabulary; every rank returns the same tokens.
    """
    gamma, shard = base.shape[1:]
    token_ids = vocab_start + torch.arange(shard, device=base.device)
    tokens, corrected = [], []
    for k in range(gamma):
        logits = base[:, k] + bf16_linear(w1[prev], w2, torch.float32)
        keys = logits
        if sampling is not None:
            purpose = torch.where(sampling.seeded, rng.TOKEN, rng.DRAFT + k)
            of = rng.stream(sampling.seed, sampling.committed + k + 1, purpose)
            of = rng.Stream(of.a[:, None], of.b[:, None])
            keys = noised(logits, sampling.temperature, of, token_ids)
        prev = token_of(tp_argmax(pack_argmax(keys, vocab_start), group))
        tokens.append(prev)
        corrected.append(logits)
    return MarkovBlock(torch.stack(tokens, 1), torch.stack(corrected, 1) if keep_logits else None)


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
