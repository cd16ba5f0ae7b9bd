"""Triton kernels of the compressors.

A launch forms the entries of the windows that close, from this forward's rows and the ring; a
later one puts raw rows into the ring: in one launch a program could overwrite what another still
reads. Where no request has that many rows, one launch does both for both compressors of a C4
layer. C4 entries come from the same binary either way, so they agree in every bit.
"""

import torch
import triton
import triton.language as tl

from dspark.kernels.common.index_pages import WIDTH
from dspark.kernels.common.index_pages_kernel import (
    PAGE_KEYS,
    hadamard,
    index_views,
    quantise_keys,
)
from dspark.kernels.common.kv_pages import HEAD
from dspark.kernels.common.kv_pages_kernel import pool_views, store_slot
from dspark.kernels.common.launch_table import LaunchConfig
from dspark.kernels.common.norm_rope_kernel import rms_scale, rotate

LAUNCH = {
    "c4_step": LaunchConfig(4, 1, {}),
    "store_rows": LaunchConfig(4, 1, {}),
    "form_c128": LaunchConfig(8, 1, {"BD": 32}),
    "finish_c128": LaunchConfig(4, 1, {}),
}

EMPTY = tl.constexpr(-1.0e30)  # finite stand-in for the score of a row that is not there


@triton.jit
def pool_terms(
    s, ape, state, plan, row, d,
    DH: tl.constexpr, TERMS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Channels d of the entry that closes at `row`: f32, averaged over its TERMS raw rows."""
    WIDTH: tl.constexpr = 2 * HALVES * DH
    position = tl.load(plan + row * 4)
    in_request = tl.load(plan + row * 4 + 3)
    j = tl.arange(0, TERMS)
    distance = TERMS - 1 - j
    exists = position >= distance
    from_batch = distance <= in_request
    if HALVES == 2:
        # Four rows of the previous group (A half), four of this group (B half).
        half = j // 4
        ring_row = tl.load(plan + row * 4 + 1 + half).to(tl.int64) + j % 4
    else:
        half = j * 0
        ring = tl.load(plan + row * 4 + 2)
        ring_row = tl.load(plan + row * 4 + 1).to(tl.int64) + (position - distance) % ring
    column = (half * DH)[:, None] + d[None, :]
    new = s + ((row - distance) * WIDTH)[:, None] + column
    old = state + (ring_row * WIDTH)[:, None] + column
    take_new = (exists & from_batch)[:, None]
    take_old = (exists & (from_batch == 0))[:, None]
    # Scores of every half come after the values of every half.
    to_score: tl.constexpr = HALVES * DH
    kv = tl.load(old, mask=take_old, other=0.0)
    kv = tl.where(take_new, tl.load(new, mask=take_new, other=0.0), kv)
    score = tl.load(old + to_score, mask=take_old, other=float("-inf"))
    score = tl.where(take_new, tl.load(new + to_score, mask=take_new, other=0.0), score)
    logit = score + tl.load(ape + j[:, None] * DH + d[None, :])
    top = tl.maximum(tl.max(logit, 0), EMPTY)
    weight = tl.exp(logit - top[None, :])
    total = tl.sum(weight, 0)
    return tl.sum(weight * kv, 0) / tl.where(total > 0, total, 1.0)


@triton.jit
def store_entry(
    x, plan, norm_w, cos_sin, codes, rope, scales, row, slot, stride, per_page, eps,
    DH: tl.constexpr, RATIO: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Norm, RoPE at the window's first token and store of x f32 [1, DH]."""
    d = tl.arange(0, DH)[None, :]
    x = x * rms_scale(x, eps, DH) * tl.load(norm_w + d).to(tl.float32)
    first_token = tl.load(plan + row * 4) + 1 - RATIO
    x = rotate(x, cos_sin, first_token, DH // 2 - 32, 1, DH, False)
    if INDEX:
        # `rope` is the f32 view of the index pool here: it holds the scales.
        code, scale = quantise_keys(hadamard(x, 1))
        page = slot // PAGE_KEYS
        offset = slot - page * PAGE_KEYS
        base = page.to(tl.int64) * stride
        tl.store(codes + base + offset * DH + d, code)
        one = tl.arange(0, 1)
        tl.store(rope + base // 4 + PAGE_KEYS * DH // 4 + offset + one, scale)
    else:
        store_slot(x, codes, rope, scales, slot, stride, per_page)


@triton.jit
def store_raw(s, state, store, row, WIDTH: tl.constexpr):
    ring_row = tl.load(store + row)
    if ring_row >= 0:
        w = tl.arange(0, WIDTH)
        tl.store(state + ring_row.to(tl.int64) * WIDTH + w, tl.load(s + row * WIDTH + w))


@triton.jit
def _c4_row(
    s, ape, state, norm_w, codes, rope, scales, plan, store, cos_sin, slots, stride, per_page,
    eps, keep_rows, DH: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        x = pool_terms(s, ape, state, plan, row, tl.arange(0, DH), DH, 8, 2)
        store_entry(
            tl.reshape(x, (1, DH)), plan, norm_w, cos_sin, codes, rope, scales, row, slot, stride,
            per_page, eps, DH, 4, INDEX,
        )  # fmt: skip
    if keep_rows:
        store_raw(s, state, store, row, 4 * DH)


# None of these may make a second binary: its entries could differ in the last bit.
@triton.jit(do_not_specialize=["per_page", "keep_rows"])
def _c4_step(
    s, ape, state, norm_w, codes, rope, scales, i_s, i_ape, i_state, i_norm_w, i_codes, i_scales,
    plan, store, cos_sin, slots, stride, i_stride, per_page, eps, keep_rows,
    DH: tl.constexpr, INDEX_DH: tl.constexpr,
):  # fmt: skip
    """One program a row and compressor: 0 main, 1 index."""
    if tl.program_id(1) == 0:
        _c4_row(
            s, ape, state, norm_w, codes, rope, scales, plan, store, cos_sin, slots,
            stride, per_page, eps, keep_rows, DH, False,
        )  # fmt: skip
    else:
        _c4_row(
            i_s, i_ape, i_state, i_norm_w, i_codes, i_scales, scales, plan, store, cos_sin,
            slots, i_stride, per_page, eps, keep_rows, INDEX_DH, True,
        )  # fmt: skip


@triton.jit
def _store_rows(s, state, store, WIDTH: tl.constexpr):
    store_raw(s, state, store, tl.program_id(0).to(tl.int64), WIDTH)


@triton.jit
def _form_c128(s, ape, state, plan, slots, entry, DH: tl.constexpr, BD: tl.constexpr):
    """A program takes BD channels of a row: 128 terms of all of them are too many for one."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(slots + row) < 0:
        return
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    tl.store(entry + row * DH + d, pool_terms(s, ape, state, plan, row, d, DH, 128, 1))


@triton.jit(do_not_specialize=["per_page"])
def _finish_c128(
    s, state, plan, store, entry, slots, norm_w, cos_sin, codes, rope, scales, stride, per_page,
    eps, DH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        x = tl.load(entry + row * DH + tl.arange(0, DH)[None, :])
        store_entry(
            x, plan, norm_w, cos_sin, codes, rope, scales, row, slot, stride, per_page, eps,
            DH, 128, False,
        )  # fmt: skip
    store_raw(s, state, store, row, 2 * DH)


def c4_compress_pair(main, index, rows, cos_sin, entries_per_page=64, eps=1e-06, *, running):
    count = main.s.shape[0]
    if count == 0:
        return
    main, index = (part._replace(s=part.s.contiguous()) for part in (main, index))
    _c4_step[(count, 2)](
        main.s, main.ape, main.state, main.norm_w, *pool_views(main.pool),
        index.s, index.ape, index.state, index.norm_w, *index_views(index.pool),
        rows.plan, rows.store, cos_sin, rows.entry, main.pool.stride(0), index.pool.stride(0),
        entries_per_page, eps, int(running), DH=HEAD, INDEX_DH=WIDTH,
        **LAUNCH["c4_step"].keywords,
    )  # fmt: skip
    if not running:
        for part in (main, index):
            _store_rows[(count,)](
                part.s,
                part.state,
                rows.store,
                WIDTH=part.s.shape[1],
                **LAUNCH["store_rows"].keywords,
            )


def c128_compress(stream, rows, cos_sin, entries_per_page=2, eps=1e-06):
    count = stream.s.shape[0]
    if count == 0:
        return
    s, ape, state, norm_w, pool = stream._replace(s=stream.s.contiguous())
    plan, store, slots = rows
    entry = torch.empty(count, HEAD, dtype=torch.float32, device=s.device)
    form, finish = LAUNCH["form_c128"], LAUNCH["finish_c128"]
    _form_c128[(count, HEAD // form.constexprs["BD"])](
        s, ape, state, plan, slots, entry, DH=HEAD, **form.keywords
    )
    _finish_c128[(count,)](
        s, state, plan, store, entry, slots, norm_w, cos_sin, *pool_views(pool),
        pool.stride(0), entries_per_page, eps, DH=HEAD, **finish.keywords,
    )  # fmt: skip
