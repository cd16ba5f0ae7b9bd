"""Torch reference of the accept ops; also the CPU production path."""

import torch
from torch import Tensor

from dspark.kernels.accept.types import Accept
from dspark.kernels.collective import Group, tp_argmax
from dspark.kernels.common import rng
from dspark.kernels.common.argmax import NOTHING, pack_argmax, token_of


def accept_greedy(
    candidates: Tensor,
    logits: Tensor,
    *,
    acceptable: Tensor,
    committed: Tensor,
    rows_run: Tensor | None = None,
    vocab_start: int = 0,
    group: Group = None,
) -> Accept:
    """Accept the longest run of drafts that equal the target's argmax; the bonus is the argmax
    that follows. Ties go to the smaller id. A row without a finite logit accepts nothing and
    yields token 0.

    Args:
        candidates: i64 [R, V]. logits: f32 [R * V, shard] processed logits, this rank's shard.
        acceptable: i32 [R] rows that may count, 1..V; 0 = padded request (nothing accepted).
        committed: i64 [R] position of candidate 0.
        rows_run: i32 [R] rows whose logits exist, >= acceptable; None = acceptable. Only
            `trimmed` looks beyond acceptable.
        vocab_start, group: the vocabulary shard; every rank returns the same values.
    """
    return accept_chosen(
        candidates,
        tp_argmax(pack_argmax(logits, vocab_start), group),
        acceptable=acceptable,
        committed=committed,
        rows_run=rows_run,
    )


def accept_chosen(
    candidates: Tensor,
    choice: Tensor,
    *,
    acceptable: Tensor,
    committed: Tensor,
    rows_run: Tensor | None = None,
) -> Accept:
    """Accept the longest run of drafts that equal the tokens the target chose; the bonus is the
    choice that follows. A row without a choice accepts nothing and yields token 0.

    The choice does not depend on the drafts, so neither does what is emitted in the end.

    Args:
        candidates: i64 [R, V].
        choice: i64 [R * V] packed tokens of `sampling.choose`, or NOTHING.
        acceptable, committed, rows_run: as in `accept_greedy`.
    """
    best = choice.view(candidates.shape)
    token = token_of(best)
    passed = (candidates[:, 1:] == token[:, :-1]) & (best[:, :-1] != NOTHING)
    accepted, trimmed = _count(passed, acceptable, rows_run)
    bonus = token.gather(1, accepted.long()[:, None])[:, 0]
    return _outcome(candidates, accepted, bonus, trimmed, committed, acceptable)


def accept_sampled(
    candidates: Tensor,
    logits: Tensor,
    draft_logits: Tensor | None,
    *,
    acceptable: Tensor,
    committed: Tensor,
    temperature: Tensor,
    seed: Tensor,
    rows_run: Tensor | None = None,
) -> Accept:
    """Exact chain rejection sampling: the emitted tokens are distributed as if the target had
    sampled them one by one, whatever the draft proposes.

    With p = softmax(logits / temperature) of a row and q = softmax(draft_logits / temperature),
    draft y is accepted iff u * q(y) < p(y), u uniform in [0, 1). At the first rejection the token
    is drawn from the residual max(p - q, 0), normalised; when all drafts are accepted (or
    acceptable ends the run) it is drawn from p of the next row.

    Why the law of one emitted token x is p. Write b = sum_y min(p(y), q(y)).
    * x = y accepted: P(draft y) * P(u q(y) < p(y)) = q(y) min(1, p(y) / q(y)) = min(p(y), q(y)).
    * rejected: P = 1 - b, then x ~ max(p - q, 0) / sum_z max(p - q, 0)(z). That sum is
      sum_z (p - min(p, q))(z) = 1 - b, so this adds max(p(x) - q(x), 0).
    * Together: min(p, q)(x) + max(p - q, 0)(x) = p(x).
    The argument holds given any prefix, and p at row j is conditioned on exactly the accepted
    prefix; by the chain rule the joint law of the run is the target's. A run cut by acceptable
    draws from p and forgets the untested draft, which is exact because acceptable was fixed
    without looking at the test. u, the residual draw and the proposals come from streams that
    share no number (`dspark.kernels.common.rng`).

    A deterministic proposal (`draft_logits` None) is q = 1 at the draft: accepted with
    probability p(y), residual p without y. If the residual is all zero, or the draft's row has no
    finite logit, the draw is from p; a target row without a finite logit accepts nothing and yields
    token 0.

    Args:
        candidates: i64 [R, V].
        logits: f32 [R * V, vocab], whole vocabulary, processed: penalties, bias and grammar
            added, and tokens outside top-k, top-p or min-p set to -inf.
        draft_logits: f32 [R, V - 1, vocab] corrected logits of `markov_block`, or None.
        acceptable, committed, rows_run: as in `accept_greedy`.
        temperature: f32 [R], above 0. seed: i64 [R], one per request.
    """
    requests, rows = candidates.shape
    drafts = candidates[:, 1:, None]  # [R, V - 1, 1]
    p = softmax(logits.view(requests, rows, -1), temperature[:, None, None])
    if draft_logits is None:
        q = torch.zeros_like(p[:, :-1]).scatter_(2, drafts, 1.0)
    else:
        q = softmax(draft_logits, temperature[:, None, None])
    usable = (q.sum(-1) > 0) & (p[:, :-1].sum(-1) > 0)

    position = committed[:, None] + torch.arange(1, rows, device=p.device)
    u = rng.uniform(rng.stream(seed[:, None], position, rng.ACCEPT))
    p_draft, q_draft = p[:, :-1].gather(2, drafts)[..., 0], q.gather(2, drafts)[..., 0]
    passed = usable & (u * q_draft < p_draft)
    accepted, trimmed = _count(passed, acceptable, rows_run)

    # Draw from the residual after a rejection, from p after the last row that may count.
    row = accepted.long()[:, None, None]
    rejected = accepted < acceptable - 1
    p_row = p.gather(1, row.expand(-1, -1, p.shape[2]))[:, 0]
    q_row = q.gather(1, row.clamp(max=rows - 2).expand(-1, -1, p.shape[2]))[:, 0]
    residual = torch.where(rejected[:, None], (p_row - q_row).clamp(min=0), p_row)
    weights = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_row)
    stream = rng.stream(seed, committed + accepted + 1, rng.RESAMPLE)
    bonus = race(weights, stream)
    return _outcome(candidates, accepted, bonus, trimmed, committed, acceptable)


def softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """softmax(logits / temperature) over the last axis in fp64, defined for every row.

    NaN counts as -inf; a row with +inf is uniform over its infinities; a row without a finite or
    +inf value is all zero.
    """
    x = logits.double() / temperature.double().clamp(min=1e-6)
    x = torch.where(x.isnan(), -torch.inf, x)
    top = x.amax(-1, keepdim=True)
    weight = torch.where(top == torch.inf, (x == torch.inf).double(), torch.exp(x - top))
    weight = torch.where(top == -torch.inf, 0.0, weight)
    return weight / weight.sum(-1, keepdim=True).clamp(min=1.0)


def race(weights: Tensor, stream: rng.Stream) -> Tensor:
    """A token drawn in proportion to weights [R, V]: the largest weight / exponential noise.

    All weights zero: token 0.
    """
    each = rng.Stream(stream.a[:, None], stream.b[:, None])
    noise = rng.exponential(each, torch.arange(weights.shape[1], device=weights.device))
    return (weights / noise).argmax(-1)


def _count(passed: Tensor, acceptable: Tensor, rows_run: Tensor | None) -> tuple[Tensor, Tensor]:
    """Leading passes capped by acceptable, and how many the cap cut off; both i32 [R]."""
    run = acceptable if rows_run is None else rows_run
    tested = torch.arange(passed.shape[1], device=passed.device) < (run - 1)[:, None]
    leading = (passed & tested).to(torch.int32).cumprod(1).sum(1)
    accepted = torch.minimum(leading, (acceptable - 1).clamp(min=0))
    return accepted.to(torch.int32), (leading - accepted).to(torch.int32)


def _outcome(
    candidates: Tensor,
    accepted: Tensor,
    bonus: Tensor,
    trimmed: Tensor,
    committed: Tensor,
    acceptable: Tensor,
) -> Accept:
    rows = candidates.shape[1]
    column = torch.arange(rows, device=candidates.device)
    shifted = torch.cat([candidates[:, 1:], torch.zeros_like(candidates[:, :1])], 1)
    tokens = torch.where(column < accepted[:, None], shifted, 0)
    tokens = torch.where(column == accepted[:, None], bonus[:, None], tokens)
    commit_len = torch.where(acceptable > 0, accepted + 1, 0)
    return Accept(accepted, bonus, commit_len, committed + commit_len, trimmed, tokens)
