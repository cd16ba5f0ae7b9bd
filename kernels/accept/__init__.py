"""K27: which drafts the target accepts, and the token it adds.

Both functions take the verify rows in a fixed stride: row `r * V + j` holds the target's logits
at candidate j of request r, V = gamma + 1. Candidate 0 is the last emitted token, candidates
1..gamma are the drafts; row j is the target's distribution of the token after candidate j.
"""

from typing import NamedTuple

from torch import Tensor

from dspark.kernels.collective import Group
from dspark.kernels.common.dispatch import use_triton


class Accept(NamedTuple):
    """Outcome of one verify step; a step always emits at least one token."""

    accepted: Tensor  # i32 [R] drafts accepted, <= verify_len - 1
    bonus: Tensor  # i64 [R] the token after them, always a legal id
    commit_len: Tensor  # i32 [R] accepted + 1, rows that join the sequence; 0 if padded
    new_len: Tensor  # i64 [R] prefix_len + commit_len
    trimmed: Tensor  # i32 [R] drafts that were right but lay beyond verify_len
    tokens: Tensor  # i64 [R, V] the accepted drafts, then the bonus, then zeros


def accept_greedy(
    candidates: Tensor,
    logits: Tensor,
    *,
    verify_len: Tensor,
    prefix_len: Tensor,
    rows_run: Tensor | None = None,
    vocab_start: int = 0,
    group: Group = None,
) -> Accept:
    """Accept the longest run of drafts that equal the target's argmax; the bonus is the argmax
    that follows. Ties go to the smaller id. A row without a finite logit accepts nothing and
    yields token 0.

    Args:
        candidates: i64 [R, V]. logits: f32 [R * V, shard] processed logits, this rank's shard.
        verify_len: i32 [R] rows that may count, 1..V; 0 = padded request (nothing accepted).
        prefix_len: i64 [R] position of candidate 0.
        rows_run: i32 [R] rows whose logits exist, >= verify_len; None = verify_len. Only
            `trimmed` looks beyond verify_len.
        vocab_start, group: the vocabulary shard; every rank returns the same values.
    """
    _check(candidates, logits)
    if use_triton(logits):
        from dspark.kernels.accept.kernel import accept_greedy as implementation
    else:
        from dspark.kernels.accept.reference import accept_greedy as implementation
    return implementation(
        candidates,
        logits,
        verify_len=verify_len,
        prefix_len=prefix_len,
        rows_run=rows_run,
        vocab_start=vocab_start,
        group=group,
    )


def accept_sampled(
    candidates: Tensor,
    logits: Tensor,
    draft_logits: Tensor | None,
    *,
    verify_len: Tensor,
    prefix_len: Tensor,
    temperature: Tensor,
    greedy: Tensor,
    seed: Tensor,
    rows_run: Tensor | None = None,
) -> Accept:
    """Exact chain rejection sampling: the emitted tokens are distributed as if the target had
    sampled them one by one, whatever the draft proposes.

    With p = softmax(logits / temperature) of a row and q = softmax(draft_logits / temperature),
    draft y is accepted iff u * q(y) < p(y), u uniform in [0, 1). At the first rejection the token
    is drawn from the residual max(p - q, 0), normalised; when all drafts are accepted (or
    verify_len ends the run) it is drawn from p of the next row.

    Why the law of one emitted token x is p. Write b = sum_y min(p(y), q(y)).
    * x = y accepted: P(draft y) * P(u q(y) < p(y)) = q(y) min(1, p(y) / q(y)) = min(p(y), q(y)).
    * rejected: P = 1 - b, then x ~ max(p - q, 0) / sum_z max(p - q, 0)(z). That sum is
      sum_z (p - min(p, q))(z) = 1 - b, so this adds max(p(x) - q(x), 0).
    * Together: min(p, q)(x) + max(p - q, 0)(x) = p(x).
    The argument holds given any prefix, and p at row j is conditioned on exactly the accepted
    prefix; by the chain rule the joint law of the run is the target's. A run cut by verify_len
    draws from p and forgets the untested draft, which is exact because verify_len was fixed
    without looking at the test. u, the residual draw and the proposals come from streams that
    share no number (`dspark.kernels.common.rng`).

    A deterministic proposal (`draft_logits` None) is q = 1 at the draft: accepted with
    probability p(y), residual p without y. Greedy rows behave as in `accept_greedy`. If the
    residual is all zero, or the draft's row has no finite logit, the draw is from p; a target row
    without a finite logit accepts nothing and yields token 0.

    Args:
        candidates: i64 [R, V].
        logits: f32 [R * V, vocab], whole vocabulary, processed: penalties, bias and grammar
            added, and tokens outside top-k, top-p or min-p set to -inf.
        draft_logits: f32 [R, gamma, vocab] corrected logits of `markov_block`, or None.
        verify_len, prefix_len, rows_run: as in `accept_greedy`.
        temperature: f32 [R]. greedy: bool [R]. seed: i64 [R], one per request.
    """
    _check(candidates, logits)
    if draft_logits is not None:
        expected = (candidates.shape[0], candidates.shape[1] - 1, logits.shape[1])
        if tuple(draft_logits.shape) != expected:
            raise ValueError(
                f"draft_logits must be {list(expected)}, got {list(draft_logits.shape)}"
            )
    if use_triton(logits):
        from dspark.kernels.accept.kernel import accept_sampled as implementation
    else:
        from dspark.kernels.accept.reference import accept_sampled as implementation
    return implementation(
        candidates,
        logits,
        draft_logits,
        verify_len=verify_len,
        prefix_len=prefix_len,
        temperature=temperature,
        greedy=greedy,
        seed=seed,
        rows_run=rows_run,
    )


def _check(candidates: Tensor, logits: Tensor) -> None:
    if candidates.dim() != 2 or logits.dim() != 2 or logits.shape[0] != candidates.numel():
        raise ValueError(
            f"candidates [R, V] need logits [R * V, vocab], got {list(candidates.shape)} and "
            f"{list(logits.shape)}"
        )
