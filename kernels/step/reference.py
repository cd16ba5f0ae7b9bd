"""Torch reference of the step ops; also the CPU production path. Integer exact, no host sync."""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dspark.kernels.step.types import (
    BatchRows,
    BlockRows,
    Bounds,
    DraftMeta,
    Rings,
    StepMeta,
    Tables,
)

Meta = TypeVar("Meta", StepMeta, DraftMeta)


def step_meta(
    rows: BatchRows,
    tables: Tables,
    bounds: Bounds,
    rings: Rings,
    *,
    store_all: bool,
    out: StepMeta | None = None,
) -> StepMeta:
    """Addresses of a target forward: prefill, decode or verify.

    Args:
        store_all: keep every raw row (decode, verify: any of them may turn out to be the last
            committed one). Otherwise keep what a later forward can read: the open block, for C4
            also the block before it and the last four positions of every page.
        out: written in place when given.

    No two rows of one call share a ring row: the highest position wins.

    Raises:
        ValueError: on a shape or ring that breaks the rules of the arguments' types.
    """
    if rows.request_slot.shape[0] == 0:
        return _write(_padded(rows.total, bounds, rings.c128, rows.request_slot.device), out)
    placed = _placed(rows)
    owner, real, in_req, pos, _, slot = placed
    count = torch.where(real, pos + 1, 0)  # tokens visible to the row, itself included
    column = pos.clamp(max=tables.token_slot.shape[1] - 1)
    token_slot = torch.where(real, tables.token_slot[slot, column].long(), 0)
    page_table = _page_table(rows, tables, bounds)

    def c4_row(position: Tensor) -> Tensor:
        """C4 ring row of `position` [T] of each row's request, -1 before the sequence starts."""
        own, page = _window_at(tables, slot, position), bounds.page
        ring_row = torch.div(own, page, rounding_mode="floor") * rings.c4 + own % rings.c4
        return torch.where(real & (position >= 0), ring_row, -1)

    c4_last, c128_last = _last_writers(placed, bounds.page, rings, store_all)
    closes_c4 = real & ((pos + 1) % 4 == 0)
    closes_c128 = real & ((pos + 1) % 128 == 0)
    c128_base = torch.where(real, slot * rings.c128, -1)
    ring = torch.full_like(pos, rings.c128)
    meta = StepMeta(
        pos=pos,
        row_req=torch.where(real, owner, -1),
        row_in_req=in_req,
        window_slot=torch.where(real, tables.window_slot[token_slot], -1),
        c4_entry=torch.where(closes_c4, token_slot // 4, -1),
        c128_entry=torch.where(closes_c128, token_slot // 128, -1),
        window_seen=_window_seen(slot, count, tables, bounds.window),
        window_len=count.clamp(max=bounds.window),
        c4_len=count // 4,
        c128_seen=_c128_seen(page_table[owner], count // 128, bounds),
        c128_len=count // 128,
        page_table=page_table,
        c4_plan=torch.stack([pos, c4_row(pos - 7), c4_row(pos - 3), in_req], 1),
        c4_store=torch.where(c4_last, c4_row(pos), -1),
        c128_plan=torch.stack([pos, c128_base, ring, in_req], 1),
        c128_store=torch.where(real & c128_last, c128_base + pos % rings.c128, -1),
    )
    return _write(meta, out)


def draft_meta(
    rows: BlockRows, tables: Tables, *, window: int, out: DraftMeta | None = None
) -> DraftMeta:
    """Addresses of a draft block at positions L..L+gamma-1, L = `committed`.

    Each row attends to the draft latents of positions max(valid_from, L - window)..L-1 and to all
    gamma block rows (the block is not causal). Compacted, ascending.

    Args:
        tables: including the gamma block positions.
        out: written in place when given.

    Raises:
        ValueError: when gamma or window is not positive, or the lengths disagree.
    """
    request_slot, committed, valid_from, gamma = rows
    device = request_slot.device
    real = request_slot >= 0
    slot = request_slot.clamp(min=0)
    # Window and block are one run of positions: first..L-1 then L..L+gamma-1.
    first = torch.minimum(torch.maximum(valid_from, committed - window).clamp(min=0), committed)
    length = torch.where(real, committed - first + gamma, 0)

    k = torch.arange(window + gamma, device=device)
    seen = torch.where(k < length[:, None], _window_at(tables, slot, first[:, None] + k), -1)
    block = committed[:, None] + torch.arange(gamma, device=device)
    meta = DraftMeta(
        pos=torch.where(real[:, None], block, 0).flatten(),
        window_slot=torch.where(real[:, None], _window_at(tables, slot, block), -1).flatten(),
        seen=seen.repeat_interleave(gamma, 0),
        length=length.repeat_interleave(gamma, 0),
    )
    return _write(meta, out)


class Placed(NamedTuple):
    """The T rows of a forward, found in their requests; padded ones carry position 0."""

    owner: Tensor  # i64 [T] request of the row, 0..R-1
    real: Tensor  # bool [T] False = padded
    in_req: Tensor  # i64 [T] index of the row inside its request
    pos: Tensor  # i64 [T]
    end: Tensor  # i64 [T] first position of the row's request after this forward
    slot: Tensor  # i64 [T] request slot


def _placed(rows: BatchRows) -> Placed:
    """Which request each row belongs to; rows of padded requests are padded rows."""
    request_slot, committed, run, total, width = rows
    row = torch.arange(total, device=request_slot.device)
    if width is None:
        row_end = run.cumsum(0)
        owner = torch.searchsorted(row_end, row, right=True)
        real = owner < request_slot.shape[0]
        owner = owner.clamp(max=request_slot.shape[0] - 1)
        in_req = row - (row_end - run)[owner]
    else:
        owner = torch.div(row, width, rounding_mode="floor")
        in_req = row - owner * width
        real = in_req < run[owner]
    real &= request_slot[owner] >= 0
    in_req = torch.where(real, in_req, 0)
    pos = torch.where(real, committed[owner] + in_req, 0)
    slot = request_slot.clamp(min=0)[owner]
    return Placed(owner, real, in_req, pos, (committed + run)[owner], slot)


def _window_at(tables: Tables, slot: Tensor, position: Tensor) -> Tensor:
    """Window slot of `position` [n] or [n, k] of request slots [n]; garbage if < 0."""
    column = position.clamp(0, tables.token_slot.shape[1] - 1)
    request = slot.view(-1, *[1] * (position.dim() - 1))
    return tables.window_slot[tables.token_slot[request, column].long()]


def _window_seen(slot: Tensor, count: Tensor, tables: Tables, window: int) -> Tensor:
    """[T, W] window slots of the last of `count` [T] tokens, -1 tail."""
    k = torch.arange(window, device=count.device)
    length = count.clamp(max=window)
    seen = _window_at(tables, slot, (count - length)[:, None] + k)
    return torch.where(k < length[:, None], seen, -1)


def _page_table(rows: BatchRows, tables: Tables, bounds: Bounds) -> Tensor:
    """[R, max_pages]: every page with at least one token of the request."""
    first = torch.arange(bounds.max_pages, device=rows.run.device) * bounds.page
    tokens = torch.where(rows.request_slot >= 0, rows.committed + rows.run, 0)
    column = first.clamp(max=tables.token_slot.shape[1] - 1)
    head = tables.token_slot[rows.request_slot.clamp(min=0)[:, None], column]
    page = torch.div(head, bounds.page, rounding_mode="floor")
    return torch.where(first < tokens[:, None], page, -1)


def _c128_seen(pages: Tensor, count: Tensor, bounds: Bounds) -> Tensor:
    """[T, B] slots of the first `count` [T] entries on the rows' pages [T, max_pages], -1 tail."""
    per_page = bounds.page // 128
    entry = torch.arange(bounds.max_c128, device=count.device)
    page = (entry // per_page).clamp(max=max(bounds.max_pages - 1, 0))
    slot = pages[:, page] * per_page + entry % per_page
    return torch.where(entry < count[:, None], slot, -1)


def _last_writers(
    placed: Placed, page: int, rings: Rings, store_all: bool
) -> tuple[Tensor, Tensor]:
    """bool [T] each: rows that the C4 and the C128 ring keep.

    The last writer of a ring row keeps it; pages bound the C4 ring, slots the C128 ring.
    """
    pos, end = placed.pos, placed.end
    c4 = (pos + rings.c4 >= end) | (pos % page + rings.c4 >= page)
    c128 = pos + rings.c128 >= end
    if not store_all:
        c4 &= (pos >= end // 4 * 4 - 4) | (pos % page >= page - 4)
        c128 &= pos >= end // 128 * 128
    return c4, c128


def _padded(rows: int, bounds: Bounds, ring_c128: int, device: torch.device) -> StepMeta:
    """All rows padded: the forward of an idle rank."""
    zero = torch.zeros(rows, dtype=torch.int64, device=device)
    none = zero - 1
    return StepMeta(
        pos=zero,
        row_req=none,
        row_in_req=zero,
        window_slot=none,
        c4_entry=none,
        c128_entry=none,
        window_seen=none[:, None].expand(rows, bounds.window),
        window_len=zero,
        c4_len=zero,
        c128_seen=none[:, None].expand(rows, bounds.max_c128),
        c128_len=zero,
        page_table=torch.empty(0, bounds.max_pages, dtype=torch.int64, device=device),
        c4_plan=torch.stack([zero, none, none, zero], 1),
        c4_store=none,
        c128_plan=torch.stack([zero, none, zero + ring_c128, zero], 1),
        c128_store=none,
    )


def _write(meta: Meta, out: Meta | None) -> Meta:
    """Narrow to the declared types, in place when `out` is given."""
    if out is None:
        narrowed = [
            value if name == "pos" else value.to(torch.int32)
            for name, value in zip(meta._fields, meta, strict=True)
        ]
        return type(meta)(*narrowed)
    for target, value in zip(out, meta, strict=True):
        target.copy_(value)
    return out
