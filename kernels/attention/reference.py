"""Torch reference of sparse attention; also the CPU production path.

Rows of one request see nearly the same keys. Reading and decoding a key costs more than the
products with it, so a run of such rows reads each key once and hides from every row what is not
in its lists.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.kernels.attention.types import SlotList
from dspark.kernels.common.kv_pages import NOPE, load_slots
from dspark.kernels.common.norm_rope import rotate, rotation

LONGEST_RUN = 32  # bounds the f64 keys of a run


class Keys(NamedTuple):
    """The keys of a run of rows."""

    values: Tensor  # f64 [U, 512]; zeros where a single row has no slot
    times: Tensor  # f64 [T, U] how often a row's list holds the key; 0 hides it


def mla_sparse(
    q: Tensor,
    window: SlotList,
    compressed: SlotList | None,
    sink: Tensor,
    scale: float,
    cos_sin: Tensor | None,
    pos: Tensor,
    *,
    running: bool | None = None,
) -> Tensor:
    """Attend each row to its window slots, then to its compressed entries.

    o = sum_j p_j k_j with p = softmax over both lists and a per-head sink logit that counts in the
    denominator only; the slot is key and value at once.

    Args:
        q: bf16 (served) or f32 (oracle) [T, H, 512], any number of heads.
        sink: f32 [H], not scaled. scale: applied to q . k.
        cos_sin: f32 [max_positions, 64] undoes the values' rotation at `pos` i64 [T]; None skips.
        running: True for decode, verify and draft blocks, be they of many requests: the host waits
            for nothing. False for prompts, be they short. Either way a row has the same bits in
            every batch, but the two differ in rounding. None chooses by T. The reference knows one
            way only.

    Returns:
        [T, H, 512] in q's dtype; a row with empty lists is 0.

    Raises:
        ValueError: for shapes that disagree.
    """
    out = torch.empty_like(q)
    lists = [_in_use(one) for one in (window, compressed) if one is not None]
    for rows in runs(lists[0].idx, window.length):
        o = _attend_run(q[rows].double(), [part.rows(rows) for part in lists], sink.double(), scale)
        if cos_sin is not None:
            back = rotation(cos_sin, pos[rows]).conj()[:, None]
            o[..., NOPE:] = rotate(o[..., NOPE:], back)
        out[rows] = o.to(q.dtype)
    return out


def _in_use(part: SlotList) -> SlotList:
    """The list with -1 in the places that are not in use."""
    column = torch.arange(part.idx.shape[1], device=part.idx.device)
    return part._replace(idx=part.idx.masked_fill(column >= part.length[:, None], -1))


def runs(slots: Tensor, length: Tensor) -> list[slice]:
    """Rows cut where a row does not see the newest key of the one before, or a run gets too long.

    A padded row, which sees nothing, stays with the rows before it.
    slots: i32 [T, N], -1 for none. length: i32 [T] places in use.
    """
    rows = slots.shape[0]
    if rows < 2:
        return [slice(0, rows)] if rows else []
    newest = slots.gather(1, (length[:, None].long() - 1).clamp(min=0))
    shares = ((slots[1:] == newest[:-1]) & (newest[:-1] >= 0)).any(1)
    goes_on = (shares | (length[1:] == 0)).tolist()
    starts = [0]
    for row, joined in enumerate(goes_on, start=1):
        if not joined or row - starts[-1] == LONGEST_RUN:
            starts.append(row)
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], rows], strict=True)]


def _attend_run(q: Tensor, lists: list[SlotList], sink: Tensor, scale: float) -> Tensor:
    """f64 [T, H, 512] of rows q f64 [T, H, 512] that share their keys."""
    keys = [_load(part) for part in lists]
    if q.shape[0] == 1 or all(bool(part.values.sum().isfinite()) for part in keys):
        return _attend(q, keys, sink, scale)
    # Hidden from a row means times 0, which does not stop a NaN: every row reads its own keys.
    each = (slice(row, row + 1) for row in range(q.shape[0]))
    return torch.cat(
        [_attend(q[row], [_load(part.rows(row)) for part in lists], sink, scale) for row in each]
    )


def _load(part: SlotList) -> Keys:
    if part.idx.shape[0] == 1:
        values = load_slots(part.pool, part.per_page, part.idx[0])
        return Keys(values, (part.idx >= 0).double())
    slots, place = torch.unique(part.idx, return_inverse=True)
    times = torch.zeros(part.idx.shape[0], slots.shape[0], dtype=torch.float64, device=slots.device)
    times.scatter_add_(1, place, (part.idx >= 0).double())
    return Keys(load_slots(part.pool, part.per_page, slots), times)


def _attend(q: Tensor, keys: list[Keys], sink: Tensor, scale: float) -> Tensor:
    """f64 [T, H, 512]: softmax over all keys, the sink [H] counting in the denominator only."""
    rows, heads, width = q.shape
    flat = q.reshape(rows * heads, width)
    scores = (
        torch.cat([flat @ part.values.T for part in keys], -1).view(rows, heads, -1).mul_(scale)
    )
    times = torch.cat([part.times for part in keys], -1)[:, None]
    scores.masked_fill_(times == 0, -torch.inf)
    sink = sink[:, None].expand(rows, -1, 1)
    top = torch.cat([scores, sink], -1).amax(-1, keepdim=True)
    weight = (scores - top).exp_().mul_(times)
    total = weight.sum(-1, keepdim=True) + (sink - top).exp()
    parts = zip(weight.split([part.values.shape[0] for part in keys], -1), keys, strict=True)
    summed = sum(part.reshape(rows * heads, -1) @ kept.values for part, kept in parts)
    return summed.view(rows, heads, width) / total
