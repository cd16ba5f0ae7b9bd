"""Triton kernels of the step ops: a launch writes every address of a forward or of a block."""

import triton
import triton.language as tl

from dspark.kernels.common.launch_table import LaunchConfig
from dspark.kernels.step.types import empty_draft_meta, empty_step_meta

LAUNCH = {
    "step_meta": LaunchConfig(1, 1, {"BLOCK_R": 32, "BLOCK": 128}),
    "draft_meta": LaunchConfig(1, 1, {"BLOCK": 128}),
}


@triton.jit
def _window_at(table_row, window_table, position, columns, mask):
    """Window slots (i32) of positions of one request; -1 where masked."""
    full = tl.load(table_row + tl.minimum(position, columns - 1), mask=mask, other=0)
    return tl.load(window_table + full, mask=mask, other=-1).to(tl.int32)


@triton.jit
def _c4_row(table_row, window_table, position, columns, real, page, ring):
    """C4 ring row of one position; -1 for a position below 0 or a padded row."""
    slot = _window_at(
        table_row, window_table, tl.maximum(position, 0), columns, real & (position >= 0)
    )
    return tl.where(slot >= 0, slot // page * ring + slot % ring, -1)


@triton.jit
def _owner_of(row, run, requests, BLOCK_R: tl.constexpr):
    """(request that holds a packed row, rows of the requests before it)."""
    owner = 0
    before = 0
    end = 0
    for first in range(0, requests, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        length = tl.load(run + r, mask=r < requests, other=0).to(tl.int32)
        ends = end + tl.cumsum(length, 0)
        passed = (ends <= row) & (r < requests)
        owner += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, length, 0), 0)
        end += tl.sum(length, 0)
    return owner, before


@triton.jit
def _page_table_row(
    request, request_slot, committed, run, token_table, page_table, table_stride, columns,
    max_pages, page, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.load(request_slot + request).to(tl.int64)
    tokens = (tl.load(committed + request) + tl.load(run + request)).to(tl.int32)
    tokens = tl.where(slot >= 0, tokens, 0)
    table_row = token_table + tl.maximum(slot, 0) * table_stride
    for start in range(0, max_pages, BLOCK):
        k = start + tl.arange(0, BLOCK)
        held = (k * page < tokens) & (k < max_pages)
        first = tl.load(table_row + tl.minimum(k * page, columns - 1), mask=held, other=0)
        value = tl.where(held, first // page, -1)
        tl.store(page_table + request * max_pages + k, value, mask=k < max_pages)


# Sizes that change from batch to batch: a compilation each would stop requests while they decode.
@triton.jit(do_not_specialize=["rows", "requests", "width", "max_pages", "max_c128"])
def _step_meta(
    request_slot, committed, run, token_table, window_table,
    pos, row_req, row_in_req, window_slot, c4_entry, c128_entry, window_seen, window_len, c4_len,
    c128_seen, c128_len, page_table, c4_plan, c4_store, c128_plan, c128_store,
    rows, requests, width, table_stride, columns, window, ring_c4, ring_c128, max_pages,
    max_c128, page,
    PACKED: tl.constexpr, STORE_ALL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program t < rows: row t. The programs after those: a page table each."""
    row = tl.program_id(0)
    if row >= rows:
        _page_table_row(
            row - rows, request_slot, committed, run, token_table, page_table, table_stride,
            columns, max_pages, page, BLOCK,
        )  # fmt: skip
    else:
        if PACKED:
            owner, before = _owner_of(row, run, requests, BLOCK_R)
        else:
            owner = row // width
            before = owner * width
        in_req = row - before
        known = owner < requests
        slot = tl.load(request_slot + owner, mask=known, other=-1).to(tl.int64)
        start = tl.load(committed + owner, mask=known, other=0).to(tl.int32)
        length = tl.load(run + owner, mask=known, other=0).to(tl.int32)
        real = known & (slot >= 0) & (in_req < length)
        in_req = tl.where(real, in_req, 0)
        p = tl.where(real, start + in_req, 0)
        count = tl.where(real, p + 1, 0)  # tokens visible to the row, itself included
        end = start + length  # first position after this forward
        table_row = token_table + tl.maximum(slot, 0) * table_stride
        full = tl.load(table_row + tl.minimum(p, columns - 1), mask=real, other=0)

        tl.store(pos + row, p.to(tl.int64))
        tl.store(row_req + row, tl.where(real, owner, -1))
        tl.store(row_in_req + row, in_req)
        tl.store(window_slot + row, tl.load(window_table + full, mask=real, other=-1).to(tl.int32))
        tl.store(c4_entry + row, tl.where(real & (p % 4 == 3), full // 4, -1))
        tl.store(c128_entry + row, tl.where(real & (p % 128 == 127), full // 128, -1))
        tl.store(c4_len + row, count // 4)
        tl.store(c128_len + row, count // 128)

        visible = tl.minimum(count, window)
        tl.store(window_len + row, visible)
        for i in range(0, window, BLOCK):
            k = i + tl.arange(0, BLOCK)
            slots = _window_at(table_row, window_table, count - visible + k, columns, k < visible)
            tl.store(window_seen + row.to(tl.int64) * window + k, slots, mask=k < window)
        # Entry j closes position 128 * j + 127, in the slot its first token names.
        for i in range(0, max_c128, BLOCK):
            j = i + tl.arange(0, BLOCK)
            closed = (j < count // 128) & (j < max_c128)
            first = tl.load(table_row + j * 128, mask=closed, other=-128)
            at = c128_seen + row.to(tl.int64) * max_c128 + j
            tl.store(at, tl.where(closed, first // 128, -1), mask=j < max_c128)

        # The last writer of a ring row keeps it; pages bound the C4 ring, slots the C128 ring.
        c4_last = (p + ring_c4 >= end) | (p % page + ring_c4 >= page)
        c128_last = p + ring_c128 >= end
        if not STORE_ALL:
            c4_last = c4_last & ((p >= end // 4 * 4 - 4) | (p % page >= page - 4))
            c128_last = c128_last & (p >= end // 128 * 128)
        here = _c4_row(table_row, window_table, p, columns, real, page, ring_c4)
        tl.store(c4_store + row, tl.where(c4_last, here, -1))
        base = tl.where(real, slot * ring_c128, -1).to(tl.int32)
        tl.store(c128_store + row, tl.where(real & c128_last, base + p % ring_c128, -1))

        previous = _c4_row(table_row, window_table, p - 7, columns, real, page, ring_c4)
        current = _c4_row(table_row, window_table, p - 3, columns, real, page, ring_c4)
        tl.store(c4_plan + row * 4, p)
        tl.store(c4_plan + row * 4 + 1, previous)
        tl.store(c4_plan + row * 4 + 2, current)
        tl.store(c4_plan + row * 4 + 3, in_req)
        tl.store(c128_plan + row * 4, p)
        tl.store(c128_plan + row * 4 + 1, base)
        tl.store(c128_plan + row * 4 + 2, ring_c128)
        tl.store(c128_plan + row * 4 + 3, in_req)


@triton.jit
def _draft_meta(
    request_slot, committed, valid_from, token_table, window_table, pos, window_slot, seen, length,
    gamma, table_stride, columns, window, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (request and block row): its own address and a copy of the request's list."""
    row = tl.program_id(0)
    request = row // gamma
    slot = tl.load(request_slot + request).to(tl.int64)
    real = slot >= 0
    table_row = token_table + tl.maximum(slot, 0) * table_stride
    begin = tl.load(committed + request).to(tl.int32)
    first = tl.maximum(tl.load(valid_from + request).to(tl.int32), begin - window)
    first = tl.minimum(tl.maximum(first, 0), begin)
    n = tl.where(real, begin - first + gamma, 0)
    p = begin + row % gamma
    tl.store(pos + row, tl.where(real, p, 0).to(tl.int64))
    tl.store(window_slot + row, _window_at(table_row, window_table, p, columns, real))
    tl.store(length + row, n)
    for start in range(0, window + gamma, BLOCK):
        k = start + tl.arange(0, BLOCK)
        slots = _window_at(table_row, window_table, first + k, columns, k < n)
        tl.store(seen + row * (window + gamma) + k, slots, mask=k < window + gamma)


def step_meta(rows, tables, bounds, rings, *, store_all, out=None):
    request_slot, committed, run, total, width = rows
    requests = request_slot.shape[0]
    if out is None:
        out = empty_step_meta(total, requests, bounds, device=request_slot.device)
    if total + requests:
        table = tables.token_slot
        _step_meta[(total + requests,)](
            request_slot, committed, run, table, tables.window_slot, *out,
            total, requests, width or 0, table.stride(0), table.shape[1], bounds.window,
            *rings, bounds.max_pages, bounds.max_c128, bounds.page,
            PACKED=width is None, STORE_ALL=store_all,
            **LAUNCH["step_meta"].keywords,
        )  # fmt: skip
    return out


def draft_meta(rows, tables, *, window, out=None):
    request_slot, committed, valid_from, gamma = rows
    requests = request_slot.shape[0]
    if out is None:
        out = empty_draft_meta(
            requests=requests, gamma=gamma, window=window, device=request_slot.device
        )
    if requests:
        table = tables.token_slot
        _draft_meta[(requests * gamma,)](
            request_slot, committed, valid_from, table, tables.window_slot, *out,
            gamma, table.stride(0), table.shape[1], window,
            **LAUNCH["draft_meta"].keywords,
        )  # fmt: skip
    return out
