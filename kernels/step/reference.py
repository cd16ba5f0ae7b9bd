"""Torch reference of the step ops; also the CPU production path. Integer exact, no host sync."""

from typing import TypeVar

import torch
from torch import Tensor

from dspark.kernels.step.types import DraftMeta, StepMeta

Meta = TypeVar("Meta", StepMeta, DraftMeta)


def step_meta(
    *,
    request_slot: Tensor,
    committed: Tensor,
    row_len: Tensor,
    rows: int,
    req_to_token: Tensor,
    full_to_swa: Tensor,
    window: int,
    ring_c4: int,
    ring_c128: int,
    max_pages: int,
    max_c128: int,
    page: int = 256,
    store_all: bool,
    stride: int | None = None,
    out: StepMeta | None = None,
) -> StepMeta:
    """Addresses of a target forward: prefill, decode or verify.

    Row r of request i has position `committed[i] + r`. Rows are packed request after request,
    and rows past `sum(row_len)` are padded; or, with `stride`, row r of request i is row
    `i * stride + r` and the rest of its stride is padded (a verify launches a fixed shape while
    lengths live on the device). Rows of a request with `request_slot` -1 are padded.

    Args:
        request_slot: i64 [R], row of `req_to_token`; -1 = padded request.
        committed: i64 [R], position of the first row. row_len: i64 [R], rows in this forward.
        rows: T, static.
        req_to_token: i32 [S, M] full-pool location of each position, this forward included.
        full_to_swa: i64 [F] window-pool slot of each full-pool location.
        ring_c4, ring_c128: rows of the compressor rings, per page and per request slot.
        store_all: keep every raw row (decode, verify: any of them may turn out to be the last
            committed one). Otherwise keep what a later forward can read: the open block, for C4
            also the block before it and the last four positions of every page.
        stride: rows launched per request, `row_len` <= stride and T = R * stride; None = packed.
        out: written in place when given.

    No two rows of one call share a ring row: the highest position wins.

    Raises:
        ValueError: on a shape or ring that breaks these rules.
    """
    device = request_slot.device
    requests = request_slot.shape[0]
    if requests == 0:
        return _write(_padded(rows, window, max_pages, max_c128, ring_c128, device), out)
    slot = request_slot.clamp(min=0)

    # Which request each row belongs to; rows of padded requests are padded rows.
    row = torch.arange(rows, device=device)
    if stride is None:
        row_end = row_len.cumsum(0)
        owner = torch.searchsorted(row_end, row, right=True)
        real = owner < requests
        owner = owner.clamp(max=requests - 1)
        in_req = row - (row_end - row_len)[owner]
    else:
        owner = torch.div(row, stride, rounding_mode="floor")
        in_req = row - owner * stride
        real = in_req < row_len[owner]
    real &= request_slot[owner] >= 0
    in_req = torch.where(real, in_req, 0)
    pos = torch.where(real, committed[owner] + in_req, 0)
    end = (committed + row_len)[owner]  # first position after this forward
    row_slot = slot[owner]

    def swa_at(position: Tensor) -> Tensor:
        """Window-pool slot of `position` [T] or [T, n] of each row's request; garbage if < 0."""
        column = position.clamp(0, req_to_token.shape[1] - 1)
        request = row_slot.view(-1, *[1] * (position.dim() - 1))
        return full_to_swa[req_to_token[request, column].long()]

    def c4_row(position: Tensor) -> Tensor:
        swa = swa_at(position)
        ring_row = torch.div(swa, page, rounding_mode="floor") * ring_c4 + swa % ring_c4
        return torch.where(real & (position >= 0), ring_row, -1)

    column = pos.clamp(max=req_to_token.shape[1] - 1)
    full_loc = torch.where(real, req_to_token[row_slot, column].long(), 0)
    swa_loc = torch.where(real, full_to_swa[full_loc], -1)
    count = torch.where(real, pos + 1, 0)  # tokens visible to the row, itself included

    swa_len = count.clamp(max=window)
    k = torch.arange(window, device=device)
    swa_idx = torch.where(k < swa_len[:, None], swa_at((count - swa_len)[:, None] + k), -1)

    # Page tables hold every page with at least one token of this request.
    first = torch.arange(max_pages, device=device) * page
    tokens = torch.where(request_slot >= 0, committed + row_len, 0)
    head = req_to_token[slot[:, None], first.clamp(max=req_to_token.shape[1] - 1)]
    page_of = torch.div(head, page, rounding_mode="floor")
    page_table = torch.where(first < tokens[:, None], page_of, -1)

    per_page = page // 128
    entry = torch.arange(max_c128, device=device)
    c128_len = count // 128
    entry_page = (entry // per_page).clamp(max=max(max_pages - 1, 0))
    c128_idx = torch.where(
        entry < c128_len[:, None],
        page_table[owner][:, entry_page] * per_page + entry % per_page,
        -1,
    )

    # The last writer of a ring row keeps it; pages bound the C4 ring, slots the C128 ring.
    c4_last = (pos + ring_c4 >= end) | (pos % page + ring_c4 >= page)
    c128_last = pos + ring_c128 >= end
    if not store_all:
        c4_last &= (pos >= end // 4 * 4 - 4) | (pos % page >= page - 4)
        c128_last &= pos >= end // 128 * 128

    closes_c4 = real & ((pos + 1) % 4 == 0)
    closes_c128 = real & ((pos + 1) % 128 == 0)
    c128_base = torch.where(real, row_slot * ring_c128, -1)
    ring = torch.full_like(pos, ring_c128)
    meta = StepMeta(
        pos=pos,
        row_req=torch.where(real, owner, -1),
        row_in_req=in_req,
        swa_loc=swa_loc,
        c4_loc=torch.where(closes_c4, full_loc // 4, -1),
        c128_loc=torch.where(closes_c128, full_loc // 128, -1),
        swa_idx=swa_idx,
        swa_len=swa_len,
        c4_len=count // 4,
        c128_idx=c128_idx,
        c128_len=c128_len,
        page_table=page_table,
        c4_plan=torch.stack([pos, c4_row(pos - 7), c4_row(pos - 3), in_req], 1),
        c4_store=torch.where(c4_last, c4_row(pos), -1),
        c128_plan=torch.stack([pos, c128_base, ring, in_req], 1),
        c128_store=torch.where(real & c128_last, c128_base + pos % ring_c128, -1),
    )
    return _write(meta, out)


def draft_meta(
    *,
    request_slot: Tensor,
    committed: Tensor,
    gamma: int,
    req_to_token: Tensor,
    full_to_swa: Tensor,
    window: int,
    valid_from: Tensor,
    out: DraftMeta | None = None,
) -> DraftMeta:
    """Addresses of a draft block at positions L..L+gamma-1, L = `committed`.

    Each row attends to the draft KV of positions max(valid_from, L - window)..L-1 and to all
    gamma block rows (the block is not causal). Compacted, ascending.

    Args:
        request_slot: i64 [R], -1 = padded request. committed: i64 [R], committed tokens.
        valid_from: i64 [R], first position whose draft KV was injected.
        req_to_token: i32 [S, M], including the gamma block positions. full_to_swa: i64 [F].
        out: written in place when given.

    Raises:
        ValueError: when gamma or window is not positive, or the lengths disagree.
    """
    device = request_slot.device
    real = request_slot >= 0
    slot = request_slot.clamp(min=0)
    # Window and block are one run of positions: first..L-1 then L..L+gamma-1.
    first = torch.minimum(torch.maximum(valid_from, committed - window).clamp(min=0), committed)
    length = torch.where(real, committed - first + gamma, 0)

    def swa_at(position: Tensor) -> Tensor:
        column = position.clamp(0, req_to_token.shape[1] - 1)
        return full_to_swa[req_to_token[slot[:, None], column].long()]

    k = torch.arange(window + gamma, device=device)
    idx = torch.where(k < length[:, None], swa_at(first[:, None] + k), -1)
    block = committed[:, None] + torch.arange(gamma, device=device)
    meta = DraftMeta(
        pos=torch.where(real[:, None], block, 0).flatten(),
        swa_loc=torch.where(real[:, None], swa_at(block), -1).flatten(),
        idx=idx.repeat_interleave(gamma, 0),
        len=length.repeat_interleave(gamma, 0),
    )
    return _write(meta, out)


def _padded(
    rows: int, window: int, max_pages: int, max_c128: int, ring_c128: int, device: torch.device
) -> StepMeta:
    """All rows padded: the forward of an idle rank."""
    zero = torch.zeros(rows, dtype=torch.int64, device=device)
    none = zero - 1
    return StepMeta(
        pos=zero,
        row_req=none,
        row_in_req=zero,
        swa_loc=none,
        c4_loc=none,
        c128_loc=none,
        swa_idx=none[:, None].expand(rows, window),
        swa_len=zero,
        c4_len=zero,
        c128_idx=none[:, None].expand(rows, max_c128),
        c128_len=zero,
        page_table=torch.empty(0, max_pages, dtype=torch.int64, device=device),
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
