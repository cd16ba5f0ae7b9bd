"""Torch reference of the sampling ops; also the CPU production path."""

import torch
from torch import Tensor

from dspark.kernels.common import elementary, rng
from dspark.kernels.common.argmax import pack_argmax
from dspark.kernels.sampling.types import Cut

SLAB = 16  # rows sorted at once: bounds the memory, whatever the batch


def cut_tails(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Cut:
    """What top-k, top-p and min-p leave of each row.

    With tokens sorted by logit, descending (ties: smaller id first), a token stays if fewer than
    top_k come before it, their probability together is at most top_p, and its own logit is at
    least the largest + temperature * ln(min_p). Probabilities are softmax(logits / temperature),
    held as integers in units of 2^-40 of the largest: their sums are exact, so a row's cut depends
    on the row alone. The first token always stays. NaN and -inf are no tokens.

    Args:
        logits: f32 [R * V, N].
        temperature: f32 [R]; 0 = greedy: nothing is cut.
        top_k: i32 [R], >= 1. top_p: f32 [R] in [0, 1]. min_p: f32 [R] in [0, 1].

    Returns:
        Cut of the R * V rows.
    """
    rows = logits.shape[0] // max(1, len(temperature))
    parameters = torch.arange(len(temperature), device=logits.device).repeat_interleave(rows)
    parts = [
        _cut(part, temperature[of], top_k[of], top_p[of], min_p[of])
        for part, of in zip(logits.split(SLAB), parameters.split(SLAB), strict=True)
    ]
    return Cut(*(torch.cat(column) for column in zip(*parts, strict=True)))


def choose(
    logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, cut: Cut | None = None
) -> Tensor:
    """The token of each row: argmax over x of logit(x) + temperature * g(seed, position, x).

    With g standard Gumbel noise that is a sample of softmax(logits / temperature); with
    temperature 0 the argmax, ties to the smaller id. Only tokens that `cut` leaves take part.

    Args:
        logits: f32 [R * V, N].
        temperature: f32 [R]. seed: i64 [R].
        position: i64 [R] of the token that row 0 of each request decides; row j's is j further.
        cut: of the R * V rows, None = everything stays.

    Returns:
        i64 [R * V] (key, id) packed (`argmax.token_of`); NOTHING for a row without a finite or
        +inf logit.
    """
    vocab = logits.shape[1]
    rows = logits.shape[0] // max(1, len(temperature))
    offset = torch.arange(rows, device=logits.device)
    of = rng.stream(seed[:, None], position[:, None] + offset, rng.TOKEN)
    of = rng.Stream(of.a.view(-1, 1), of.b.view(-1, 1))
    ids = torch.arange(vocab, device=logits.device)
    keys = logits
    if cut is not None:
        value, last = cut.value[:, None], cut.last[:, None]
        keys = keys.masked_fill(~((keys > value) | ((keys == value) & (ids <= last))), -torch.inf)
    return pack_argmax(noised(keys, temperature.repeat_interleave(rows), of, ids))


def noised(logits: Tensor, temperature: Tensor, of: rng.Stream, ids: Tensor) -> Tensor:
    """Keys [T, N] whose argmax is a sample: logits + temperature * Gumbel noise.

    temperature: f32 [T]; 0 gives the logits themselves. of: [T, 1]. ids: i64 [N].
    """
    return logits + temperature[:, None] * rng.gumbel(of, ids)


def _cut(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Cut:
    x = torch.where(logits.isnan(), -torch.inf, logits)
    order = torch.sort(x, dim=-1, descending=True, stable=True)
    top = order.values[:, :1]
    scale = temperature.clamp(min=1e-6).reciprocal() * elementary.LOG2_E
    weight = elementary.weight((order.values - top) * scale[:, None])
    weight = torch.where(order.values == top, 1 << elementary.UNIT, weight)
    weight = torch.where(order.values > -torch.inf, weight, 0)
    before = weight.cumsum(-1) - weight
    limit = _share(weight.sum(-1), top_p)
    place = torch.arange(x.shape[1], device=x.device)
    stays = (place < top_k[:, None]) & (before <= limit[:, None]) & (order.values > -torch.inf)
    end = stays.sum(-1, keepdim=True) - 1  # of the leading tokens, all of which stay
    value = order.values.gather(-1, end.clamp(min=0))[:, 0]
    last = order.indices.gather(-1, end.clamp(min=0))[:, 0]
    vocab = x.shape[1]
    following = order.values.gather(-1, (end + 1).clamp(max=vocab - 1))[:, 0]
    counted = (temperature > 0) & ((top_k < vocab) | (top_p < 1)) & (end[:, 0] >= 0)
    splits_equals = counted & (end[:, 0] + 1 < vocab) & (following == value)
    value = torch.where(counted, value, -torch.inf)

    at_least = top[:, 0] + temperature * elementary.log(min_p.clamp(min=2.0**-126))
    raised = (temperature > 0) & (min_p > 0) & (at_least > value)
    value = torch.where(raised, at_least, value)
    return Cut(value, torch.where(splits_equals & ~raised, last, vocab - 1))


def _share(total: Tensor, top_p: Tensor) -> Tensor:
    """floor(total * top_p) for i64 total < 2^62; top_p counts in steps of 2^-24."""
    steps = (top_p * 2.0**24).long()
    return (total >> 24) * steps + (((total & 0xFFFFFF) * steps) >> 24)
