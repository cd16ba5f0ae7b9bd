"""Torch reference of the step ops; also the CPU production path. Integer exact, no host sync."""

from typing import TypeVar

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
    request_slot, committed, run, total, width = rows
    window, max_pages, max_c128, page = bounds
    device = request_slot.device
    requests = request_slot.shape[0]
    if requests == 0:
        return _write(_padded(total, bounds, rings.c128, device), out)
    slot = request_slot.clamp(min=0)

    # Which request each row belongs to; rows of padded requests are padded rows.
    row = torch.arange(total, device=device)
    if width is None:
        row_end = run.cumsum(0)
        owner = torch.searchsorted(row_end, row, right=True)
        real = owner < requests
        owner = owner.clamp(max=requests - 1)
        in_req = row - (row_end - run)[owner]
    else:
        owner = torch.div(row, width, rounding_mode="floor")
        in_req = row - owner * width
        real = in_req < run[owner]
    real &= request_slot[owner] >= 0
    in_req = torch.where(real, in_req, 0)
    pos = torch.where(real, committed[owner] + in_req, 0)
    end = (committed + run)[owner]  # first position after this forward
    row_slot = slot[owner]

    def window_at(position: Tensor) -> Tensor:
        """Window slot of `position` [T] or [T, n] of each row's request; garbage if < 0."""
        column = position.clamp(0, tables.token_slot.shape[1] - 1)
        request = row_slot.view(-1, *[1] * (position.dim() - 1))
        return tables.window_slot[tables.token_slot[request, column].long()]

    def c4_row(position: Tensor) -> Tensor:
        own = window_at(position)
        ring_row = torch.div(own, page, rounding_mode="floor") * rings.c4 + own % rings.c4
        return torch.where(real & (position >= 0), ring_row, -1)

    column = pos.clamp(max=tables.token_slot.shape[1] - 1)
    token_slot = torch.where(real, tables.token_slot[row_slot, column].long(), 0)
    window_slot = torch.where(real, tables.window_slot[token_slot], -1)
    count = torch.where(real, pos + 1, 0)  # tokens visible to the row, itself included

    window_len = count.clamp(max=window)
    k = torch.arange(window, device=device)
    window_seen = torch.where(
        k < window_len[:, None], window_at((count - window_len)[:, None] + k), -1
    )

    # Page tables hold every page with at least one token of this request.
    first = torch.arange(max_pages, device=device) * page
    tokens = torch.where(request_slot >= 0, committed + run, 0)
    head = tables.token_slot[slot[:, None], first.clamp(max=tables.token_slot.shape[1] - 1)]
    page_of = torch.div(head, page, rounding_mode="floor")
    page_table = torch.where(first < tokens[:, None], page_of, -1)

    per_page = page // 128
    entry = torch.arange(max_c128, device=device)
    c128_len = count // 128
    entry_page = (entry // per_page).clamp(max=max(max_pages - 1, 0))
    c128_seen = torch.where(
        entry < c128_len[:, None],
        page_table[owner][:, entry_page] * per_page + entry % per_page,
        -1,
    )

    # The last writer of a ring row keeps it; pages bound the C4 ring, slots the C128 ring.
    c4_last = (pos + rings.c4 >= end) | (pos % page + rings.c4 >= page)
    c128_last = pos + rings.c128 >= end
    if not store_all:
        c4_last &= (pos >= end // 4 * 4 - 4) | (pos % page >= page - 4)
        c128_last &= pos >= end // 128 * 128

    closes_c4 = real & ((pos + 1) % 4 == 0)
    closes_c128 = real & ((pos + 1) % 128 == 0)
    c128_base = torch.where(real, row_slot * rings.c128, -1)
    ring = torch.full_like(pos, rings.c128)
    meta = StepMeta(
        pos=pos,
        row_req=torch.where(real, owner, -1),
        row_in_req=in_req,
        window_slot=window_slot,
        c4_entry=torch.where(closes_c4, token_slot // 4, -1),
        c128_entry=torch.where(closes_c128, token_slot // 128, -1),
        window_seen=window_seen,
        window_len=window_len,
        c4_len=count // 4,
        c128_seen=c128_seen,
        c128_len=c128_len,
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

    def window_at(position: Tensor) -> Tensor:
        column = position.clamp(0, tables.token_slot.shape[1] - 1)
        return tables.window_slot[tables.token_slot[slot[:, None], column].long()]

    k = torch.arange(window + gamma, device=device)
    seen = torch.where(k < length[:, None], window_at(first[:, None] + k), -1)
    block = committed[:, None] + torch.arange(gamma, device=device)
    meta = DraftMeta(
        pos=torch.where(real[:, None], block, 0).flatten(),
        window_slot=torch.where(real[:, None], window_at(block), -1).flatten(),
        seen=seen.repeat_interleave(gamma, 0),
        length=length.repeat_interleave(gamma, 0),
    )
    return _write(meta, out)


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
