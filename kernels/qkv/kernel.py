"""Triton kernels of K10 and K11, and the device functions other families share with them."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.common.fp8 import to_e4m3
from dspark.kernels.common.launch_table import LaunchConfig
from dspark.kernels.qkv.pages import AMAX_FLOOR, DATA_BYTES, FP8_MAX, HEAD, NOPE, SCALE_BYTES
from dspark.kernels.tooling.entries import AotEntry

LAUNCH = {
    "q_norm_rope": LaunchConfig(1, 1, {}),
    "inv_rope": LaunchConfig(1, 1, {}),
    # The order of a latent's sums depends on the warps, so these two share their number.
    "kv_norm_rope_store": LaunchConfig(2, 1, {}),
    "q_kv_prepare": LaunchConfig(2, 1, {}),
}

D = tl.constexpr(HEAD)
NOPE_D = tl.constexpr(NOPE)
ROPE_D = tl.constexpr(HEAD - NOPE)
SLOT = tl.constexpr(DATA_BYTES)
SCALES = tl.constexpr(SCALE_BYTES)
LIMIT = tl.constexpr(FP8_MAX)
FLOOR = tl.constexpr(AMAX_FLOOR)


@triton.jit
def rotate(
    x, cos_sin, position, first, N: tl.constexpr, WIDTH: tl.constexpr, INVERSE: tl.constexpr
):
    """RoPE at `position` of x f32 [N, WIDTH]: pair `first` of the tile is the first rotated one."""
    pair = tl.arange(0, WIDTH // 2) - first
    rotated = (pair >= 0) & (pair < ROPE_D // 2)  # the other pairs turn by angle 0
    angle = cos_sin + position.to(tl.int64) * ROPE_D + pair
    cos = tl.load(angle, mask=rotated, other=1.0)[None, :]
    sin = tl.load(angle + ROPE_D // 2, mask=rotated, other=0.0)[None, :]
    if INVERSE:
        sin = -sin
    even, odd = tl.split(tl.reshape(x, (N, WIDTH // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (N, WIDTH))


@triton.jit
def rms_scale(x, eps, WIDTH: tl.constexpr):
    """Reciprocal root mean square of all of x f32, whose values number WIDTH."""
    return tl.rsqrt(tl.sum(x * x) / WIDTH + eps)


@triton.jit
def store_slot(x, codes, rope, scales, slot, stride, per_page):
    """Quantise x f32 [1, 512] into one slot; `codes`, `rope`, `scales` are views of one pool."""
    page = slot // per_page
    offset = slot - page * per_page
    row = page.to(tl.int64) * stride
    data = row + offset * SLOT
    g = tl.arange(0, SCALES)
    j = tl.arange(0, D // SCALES)
    groups = tl.reshape(x, (SCALES, D // SCALES))
    amax = tl.maximum(tl.max(tl.abs(groups), 1), FLOOR)
    # Smallest power of two >= amax / 448, from the bits.
    bits = tl.div_rn(amax, LIMIT).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    d = g[:, None] * (D // SCALES) + j[None, :]
    tl.store(codes + data + d, to_e4m3(groups * inverse[:, None]), mask=d < NOPE_D)
    half = (data + NOPE_D) // 2 - NOPE_D
    tl.store(rope + half + d, groups.to(tl.bfloat16), mask=d >= NOPE_D)
    at = row + per_page * SLOT + offset * SCALES
    byte = tl.where(g < SCALES - 1, exponent, 0)  # the last byte is padding
    tl.store(scales + at + g, byte.to(tl.uint8))


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
    kv, norm_w, cos_sin, pos, loc, codes, rope, scales, row, row_stride, stride, per_page, eps
):
    slot = tl.load(loc + row)
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
    q, kv, norm_w, cos_sin, pos, loc, out, codes, rope, scales, H, row_stride, stride, per_page,
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
            kv, norm_w, cos_sin, pos, loc, codes, rope, scales, row, row_stride, stride, per_page,
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
    kv, norm_w, cos_sin, pos, loc, codes, rope, scales, row_stride, stride, per_page, eps
):
    row = tl.program_id(0).to(tl.int64)
    _latent_row(
        kv, norm_w, cos_sin, pos, loc, codes, rope, scales, row, row_stride, stride, per_page, eps
    )


def q_norm_rope(q: Tensor, cos_sin: Tensor, pos: Tensor, eps: float) -> Tensor:
    q = q.contiguous()
    out = torch.empty_like(q)
    rows, heads, _ = q.shape
    if rows:
        launch = LAUNCH["q_norm_rope"]
        _q_norm_rope[(rows * heads,)](q, cos_sin, pos, out, heads, eps, num_warps=launch.num_warps)
    return out


def inv_rope(o: Tensor, cos_sin: Tensor, pos: Tensor) -> Tensor:
    o = o.contiguous()
    out = torch.empty_like(o)
    rows, heads, _ = o.shape
    if rows:
        launch = LAUNCH["inv_rope"]
        _inv_rope[(rows * heads,)](o, cos_sin, pos, out, heads, num_warps=launch.num_warps)
    return out


def pool_views(pool: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A packed pool as e4m3 codes, bf16 rope values and scale bytes: one memory, three types."""
    if pool.dtype != torch.uint8:
        raise ValueError(f"GPU kernels read packed uint8 pools, got {pool.dtype}")
    return pool.view(torch.float8_e4m3fn), pool.view(torch.bfloat16), pool


def kv_norm_rope_store(
    kv: Tensor,
    norm_w: Tensor,
    cos_sin: Tensor,
    pos: Tensor,
    loc: Tensor,
    pool: Tensor,
    slots_per_page: int,
    eps: float,
) -> None:
    if kv.shape[0] == 0:
        return
    launch = LAUNCH["kv_norm_rope_store"]
    _kv_norm_rope_store[(kv.shape[0],)](
        kv, norm_w, cos_sin, pos, loc, *pool_views(pool), kv.stride(0), pool.stride(0),
        slots_per_page, eps, num_warps=launch.num_warps,
    )  # fmt: skip


def q_kv_prepare(
    q: Tensor,
    kv: Tensor,
    norm_w: Tensor,
    cos_sin: Tensor,
    pos: Tensor,
    loc: Tensor,
    pool: Tensor,
    slots_per_page: int,
    eps: float,
) -> Tensor:
    q = q.contiguous()
    out = torch.empty_like(q)
    rows, heads, _ = q.shape
    if rows:
        launch = LAUNCH["q_kv_prepare"]
        _q_kv_prepare[(rows * (heads + 1),)](
            q, kv, norm_w, cos_sin, pos, loc, out, *pool_views(pool), heads, kv.stride(0),
            pool.stride(0), slots_per_page, eps, num_warps=launch.num_warps,
        )  # fmt: skip
    return out


_POINTERS = {
    "q": "*bf16", "o": "*bf16", "kv": "*bf16", "norm_w": "*bf16", "cos_sin": "*fp32",
    "pos": "*i64", "loc": "*i32", "out": "*bf16",
    "codes": "*fp8e4nv", "rope": "*bf16", "scales": "*u8",
}  # fmt: skip


def _entry(op: str, fn: Any) -> AotEntry:
    launch = LAUNCH[op]
    types = {**_POINTERS, "eps": "fp32"}
    aligned = (*_POINTERS, "row_stride", "stride")
    return AotEntry(
        name=f"qkv.{op}",
        fn=fn,
        signature={name: types.get(name, "i32") for name in fn.arg_names},
        constexprs={},
        divisible=tuple(name for name in fn.arg_names if name in aligned),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        expects_mma=False,
        hot=True,
    )


AOT = [
    _entry("q_norm_rope", _q_norm_rope),
    _entry("inv_rope", _inv_rope),
    _entry("kv_norm_rope_store", _kv_norm_rope_store),
    _entry("q_kv_prepare", _q_kv_prepare),
]
