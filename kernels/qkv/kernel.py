"""Triton kernels of the query and latent ops."""

import torch
import triton
import triton.language as tl

from dspark.kernels.common.kv_pages_kernel import NOPE_D, D, pool_views, store_slot
from dspark.kernels.common.launch_table import LaunchConfig
from dspark.kernels.common.norm_rope_kernel import rms_scale, rotate

LAUNCH = {
    "q_norm_rope": LaunchConfig(1, 1, {}),
    "inv_rope": LaunchConfig(1, 1, {}),
    # The order of a latent's sums depends on the warps, so these two share their number.
    "kv_norm_rope_store": LaunchConfig(2, 1, {}),
    "q_kv_prepare": LaunchConfig(2, 1, {}),
}


@triton.jit
def _query_head(q, cos_sin, pos, out, row, head, H, eps):
    d = tl.arange(0, D)
    at = (row * H + head) * D
    x = tl.load(q + at + d).to(tl.float32)
    # Rounded to bf16 before it is rotated.
    normed = (x * rms_scale(x, eps, D)).to(tl.bfloat16).to(tl.float32)
    position = tl.load(pos + row)
    y = rotate(tl.reshape(normed, (1, D)), cos_sin, position, NOPE_D // 2, 1, D, False)
    tl.store(out + at + d[None, :], y.to(tl.bfloat16))


@triton.jit
def _latent_row(
    kv, norm_w, cos_sin, pos, slots, codes, rope, scales, row, row_stride, stride, per_page, eps
):
    slot = tl.load(slots + row)
    if slot >= 0:
        d = tl.arange(0, D)[None, :]
        x = tl.load(kv + row * row_stride + d).to(tl.float32)
        y = x * rms_scale(x, eps, D) * tl.load(norm_w + d).to(tl.float32)
        y = rotate(y, cos_sin, tl.load(pos + row), NOPE_D // 2, 1, D, False)
        store_slot(y, codes, rope, scales, slot, stride, per_page)


@triton.jit(do_not_specialize=["H"])
def _q_norm_rope(q, cos_sin, pos, out, H, eps):
    program = tl.program_id(0).to(tl.int64)
    _query_head(q, cos_sin, pos, out, program // H, program % H, H, eps)


@triton.jit(do_not_specialize=["H", "per_page"])
def _q_kv_prepare(
    q, kv, norm_w, cos_sin, pos, slots, out, codes, rope, scales, H, row_stride, stride, per_page,
    eps,
):  # fmt: skip
    """Programs 0..H-1 of a row take a query head each, program H the latent."""
    program = tl.program_id(0).to(tl.int64)
    row = program // (H + 1)
    head = program % (H + 1)
    if head < H:
        _query_head(q, cos_sin, pos, out, row, head, H, eps)
    else:
        _latent_row(
            kv, norm_w, cos_sin, pos, slots, codes, rope, scales, row, row_stride, stride, per_page,
            eps,
        )  # fmt: skip


@triton.jit(do_not_specialize=["H"])
def _inv_rope(o, cos_sin, pos, out, H):
    head = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    x = tl.load(o + head * D + d[None, :]).to(tl.float32)
    y = rotate(x, cos_sin, tl.load(pos + head // H), NOPE_D // 2, 1, D, True)
    tl.store(out + head * D + d[None, :], y.to(tl.bfloat16))


@triton.jit(do_not_specialize=["per_page"])
def _kv_norm_rope_store(
    kv, norm_w, cos_sin, pos, slots, codes, rope, scales, row_stride, stride, per_page, eps
):
    row = tl.program_id(0).to(tl.int64)
    _latent_row(
        kv, norm_w, cos_sin, pos, slots, codes, rope, scales, row, row_stride, stride, per_page, eps
    )


def q_norm_rope(q, cos_sin, pos, eps=1e-06):
    q = q.contiguous()
    out = torch.empty_like(q)
    rows, heads, _ = q.shape
    if rows:
        launch = LAUNCH["q_norm_rope"]
        _q_norm_rope[(rows * heads,)](q, cos_sin, pos, out, heads, eps, **launch.keywords)
    return out


def inv_rope(o, cos_sin, pos):
    o = o.contiguous()
    out = torch.empty_like(o)
    rows, heads, _ = o.shape
    if rows:
        launch = LAUNCH["inv_rope"]
        _inv_rope[(rows * heads,)](o, cos_sin, pos, out, heads, **launch.keywords)
    return out


def kv_norm_rope_store(kv, norm_w, cos_sin, pos, slot, pool, slots_per_page, eps=1e-06):
    if kv.shape[0] == 0:
        return
    launch = LAUNCH["kv_norm_rope_store"]
    _kv_norm_rope_store[(kv.shape[0],)](
        kv, norm_w, cos_sin, pos, slot, *pool_views(pool), kv.stride(0), pool.stride(0),
        slots_per_page, eps, **launch.keywords,
    )  # fmt: skip


def q_kv_prepare(q, kv, norm_w, cos_sin, pos, slot, pool, slots_per_page, eps=1e-06):
    q = q.contiguous()
    out = torch.empty_like(q)
    rows, heads, _ = q.shape
    if rows:
        launch = LAUNCH["q_kv_prepare"]
        _q_kv_prepare[(rows * (heads + 1),)](
            q, kv, norm_w, cos_sin, pos, slot, out, *pool_views(pool), heads, kv.stride(0),
            pool.stride(0), slots_per_page, eps, **launch.keywords,
        )  # fmt: skip
    return out
