"""Triton kernels of K12-K14.

In general a compressor takes two launches. The first forms the entries of the windows that close,
from this forward's rows and the ring; the second normalises, rotates and stores them, and only
then puts raw rows into the ring: in one launch a program could overwrite what another still reads.
Where no request has that many rows, `c4_step` does both compressors of a C4 layer in one launch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.compress.stream import C4Stream
from dspark.kernels.indexer.kernel import hadamard, quantise_keys
from dspark.kernels.indexer.pages import KEYS
from dspark.kernels.plan import AotEntry, LaunchConfig
from dspark.kernels.qkv.kernel import pool_views, rms_scale, rotate, store_slot

LAUNCH = {
    "form_c4": LaunchConfig(4, 1, {"TERMS": 8, "HALVES": 2}),
    "form_c128": LaunchConfig(8, 1, {"TERMS": 128, "HALVES": 1, "BD": 32}),
    "finish": LaunchConfig(4, 1, {}),
    "c4_step": LaunchConfig(4, 1, {}),
}

EMPTY = tl.constexpr(-1.0e30)  # finite stand-in for the score of a row that is not there
PAGE_KEYS = tl.constexpr(KEYS)


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
    """K14: norm, RoPE at the window's first token and store of x f32 [1, DH]."""
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
def _form(
    s, ape, state, plan, out_loc, entry,
    DH: tl.constexpr, TERMS: tl.constexpr, HALVES: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out_loc + row) < 0:
        return
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    tl.store(entry + row * DH + d, pool_terms(s, ape, state, plan, row, d, DH, TERMS, HALVES))


@triton.jit(do_not_specialize=["per_page"])
def _finish(
    s, state, plan, store, entry, out_loc, norm_w, cos_sin, codes, rope, scales, stride, per_page,
    eps, DH: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(out_loc + row)
    if slot >= 0:
        x = tl.load(entry + row * DH + tl.arange(0, DH)[None, :])
        store_entry(
            x, plan, norm_w, cos_sin, codes, rope, scales, row, slot, stride, per_page, eps,
            DH, RATIO, INDEX,
        )  # fmt: skip
    store_raw(s, state, store, row, WIDTH)


@triton.jit
def _c4_row(
    s, ape, state, norm_w, codes, rope, scales, plan, store, cos_sin, out_loc, stride, per_page,
    eps, DH: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(out_loc + row)
    if slot >= 0:
        x = pool_terms(s, ape, state, plan, row, tl.arange(0, DH), DH, 8, 2)
        store_entry(
            tl.reshape(x, (1, DH)), plan, norm_w, cos_sin, codes, rope, scales, row, slot, stride,
            per_page, eps, DH, 4, INDEX,
        )  # fmt: skip
    store_raw(s, state, store, row, 4 * DH)


@triton.jit(do_not_specialize=["per_page"])
def _c4_step(
    s, ape, state, norm_w, codes, rope, scales, i_s, i_ape, i_state, i_norm_w, i_codes, i_scales,
    plan, store, cos_sin, out_loc, stride, i_stride, per_page, eps,
    DH: tl.constexpr, INDEX_DH: tl.constexpr,
):  # fmt: skip
    """One program a row and compressor: entries and ring rows in one launch."""
    if tl.program_id(1) == 0:
        _c4_row(
            s, ape, state, norm_w, codes, rope, scales, plan, store, cos_sin, out_loc,
            stride, per_page, eps, DH, False,
        )  # fmt: skip
    else:
        _c4_row(
            i_s, i_ape, i_state, i_norm_w, i_codes, i_scales, scales, plan, store, cos_sin,
            out_loc, i_stride, per_page, eps, INDEX_DH, True,
        )  # fmt: skip


def c4_compress(
    s: Tensor,
    ape: Tensor,
    state: Tensor,
    plan: Tensor,
    store: Tensor,
    norm_w: Tensor,
    cos_sin: Tensor,
    out_loc: Tensor,
    pool: Tensor,
    entries_per_page: int,
    kind: str,
    eps: float,
) -> None:
    index = kind == "index"
    pointers = index_views(pool) if index else pool_views(pool)
    _compress(
        LAUNCH["form_c4"], 4, s, ape, state, plan, store, norm_w, cos_sin, out_loc, pointers,
        entries_per_page, index, eps,
    )  # fmt: skip


def c128_compress(
    s: Tensor,
    ape: Tensor,
    state: Tensor,
    plan: Tensor,
    store: Tensor,
    norm_w: Tensor,
    cos_sin: Tensor,
    out_loc: Tensor,
    pool: Tensor,
    entries_per_page: int,
    eps: float,
) -> None:
    _compress(
        LAUNCH["form_c128"], 128, s, ape, state, plan, store, norm_w, cos_sin, out_loc,
        pool_views(pool), entries_per_page, False, eps,
    )  # fmt: skip


def index_views(pool: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An index pool as e4m3 codes, f32 scales and bytes."""
    codes, _, raw = pool_views(pool)
    return codes, pool.view(torch.float32), raw


def c4_step(
    main: C4Stream,
    index: C4Stream,
    plan: Tensor,
    store: Tensor,
    cos_sin: Tensor,
    out_loc: Tensor,
    entries_per_page: int,
    eps: float,
) -> None:
    rows = main.s.shape[0]
    if rows == 0:
        return
    index_codes, index_scales, _ = index_views(index.pool)
    launch = LAUNCH["c4_step"]
    _c4_step[(rows, 2)](
        main.s.contiguous(), main.ape, main.state, main.norm_w, *pool_views(main.pool),
        index.s.contiguous(), index.ape, index.state, index.norm_w, index_codes, index_scales,
        plan, store, cos_sin, out_loc, main.pool.stride(0), index.pool.stride(0),
        entries_per_page, eps, DH=main.norm_w.shape[0], INDEX_DH=index.norm_w.shape[0],
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip


def _compress(
    form: LaunchConfig,
    ratio: int,
    s: Tensor,
    ape: Tensor,
    state: Tensor,
    plan: Tensor,
    store: Tensor,
    norm_w: Tensor,
    cos_sin: Tensor,
    out_loc: Tensor,
    pointers: tuple[Tensor, Tensor, Tensor],
    entries_per_page: int,
    index: bool,
    eps: float,
) -> None:
    rows, width = s.shape[0], norm_w.shape[0]
    if rows == 0:
        return
    s = s.contiguous()
    entry = torch.empty(rows, width, dtype=torch.float32, device=s.device)
    constants = {"BD": width, **form.constexprs}
    _form[(rows, width // constants["BD"])](
        s, ape, state, plan, out_loc, entry, DH=width,
        num_warps=form.num_warps, num_stages=form.num_stages, **constants,
    )  # fmt: skip
    finish = LAUNCH["finish"]
    _finish[(rows,)](
        s, state, plan, store, entry, out_loc, norm_w, cos_sin, *pointers,
        pointers[2].stride(0), entries_per_page, eps,
        DH=width, RATIO=ratio, WIDTH=s.shape[1], INDEX=index,
        num_warps=finish.num_warps, num_stages=finish.num_stages, **finish.constexprs,
    )  # fmt: skip


_POINTERS = {
    "s": "*fp32", "ape": "*fp32", "state": "*fp32", "plan": "*i32", "store": "*i32",
    "out_loc": "*i32", "entry": "*fp32", "norm_w": "*bf16", "cos_sin": "*fp32",
    "codes": "*fp8e4nv", "rope": "*bf16", "scales": "*u8",
    "i_s": "*fp32", "i_ape": "*fp32", "i_state": "*fp32", "i_norm_w": "*bf16",
    "i_codes": "*fp8e4nv", "i_scales": "*fp32",
}  # fmt: skip


def _entry(
    name: str, fn: Any, launch: LaunchConfig, index: bool = False, **constexprs: int
) -> AotEntry:
    constants = {**launch.constexprs, **constexprs}
    arguments = [argument for argument in fn.arg_names if argument not in constants]
    signature = {argument: _POINTERS.get(argument, "i32") for argument in arguments}
    if "eps" in signature:
        signature["eps"] = "fp32"
    if index:
        signature["rope"] = "*fp32"
    return AotEntry(
        name=f"compress.{name}",
        fn=fn,
        signature=signature,
        constexprs=constants,
        divisible=tuple(a for a in arguments if a in _POINTERS or a.endswith("stride")),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        expects_mma=False,
        hot=True,
    )


AOT = [
    _entry("form[c4]", _form, LAUNCH["form_c4"], DH=512, BD=512),
    _entry("form[c4 index]", _form, LAUNCH["form_c4"], DH=128, BD=128),
    _entry("form[c128]", _form, LAUNCH["form_c128"], DH=512),
    _entry("finish[c4]", _finish, LAUNCH["finish"], DH=512, RATIO=4, WIDTH=2048, INDEX=0),
    _entry(
        "finish[c4 index]", _finish, LAUNCH["finish"], True, DH=128, RATIO=4, WIDTH=512, INDEX=1
    ),
    _entry("finish[c128]", _finish, LAUNCH["finish"], DH=512, RATIO=128, WIDTH=1024, INDEX=0),
    _entry("c4_step", _c4_step, LAUNCH["c4_step"], DH=512, INDEX_DH=128),
]
