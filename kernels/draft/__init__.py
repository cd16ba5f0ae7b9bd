"""K24, K25: from the draft block's logits to draft tokens, and how far to trust each of them."""

from typing import NamedTuple

from torch import Tensor

from dspark.kernels.collective import Group
from dspark.kernels.common.dispatch import use_triton
from dspark.kernels.linear import Bf16Weight


class MarkovBlock(NamedTuple):
    tokens: Tensor  # i64 [R, gamma] proposals d_1..d_gamma
    logits: Tensor  # f32 [R, gamma, shard] corrected logits; q = softmax(logits / temperature)


class Confidence(NamedTuple):
    probability: Tensor  # f32 [R, gamma] calibrated chance that the draft is accepted
    logit: Tensor  # f32 [R, gamma] raw, before the temperature: what calibration is fitted on


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
    if temperature is not None and (seed is None or prefix_len is None):
        raise ValueError("sampling drafts needs seed and prefix_len")
    if use_triton(base):
        from dspark.kernels.draft.kernel import markov_block as implementation
    else:
        from dspark.kernels.draft.reference import markov_block as implementation
    return implementation(
        base,
        prev,
        w1,
        w2,
        temperature=temperature,
        greedy=greedy,
        seed=seed,
        prefix_len=prefix_len,
        vocab_start=vocab_start,
        group=group,
    )


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
    if use_triton(hidden):
        from dspark.kernels.draft.kernel import confidence as implementation
    else:
        from dspark.kernels.draft.reference import confidence as implementation
    return implementation(hidden, prev_tokens, w1, proj, temperature)
