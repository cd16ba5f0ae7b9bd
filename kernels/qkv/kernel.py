"""Triton kernels of K10 and K11, and the device functions other families share with them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.plan import AotEntry, LaunchConfig
from dspark.kernels.qkv.pages import AMAX_FLOOR, DATA_BYTES, FP8_MAX, HEAD, NOPE, SCALE_BYTES

LAUNCH = {
    "q_norm_rope": LaunchConfig(1, 1, {}),
    "inv_rope": LaunchConfig(1, 1, {}),
    "kv_norm_rope_store": LaunchConfig(4, 1, {}),
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
    scaled = tl.minimum(tl.maximum(groups * inverse[:, None], -LIMIT), LIMIT)
    d = g[:, None] * (D // SCALES) + j[None, :]
    tl.store(codes + data + d, scaled.to(tl.float8e4nv), mask=d < NOPE_D)
    half = (data + NOPE_D) // 2 - NOPE_D
    tl.store(rope + half + d, groups.to(tl.bfloat16), mask=d >= NOPE_D)
    at = row + per_page * SLOT + offset * SCALES
    byte = tl.where(g < SCALES - 1, exponent, 0)  # the last byte is padding
    tl.store(scales + at + g, byte.to(tl.uint8))


@triton.jit(do_not_specialize=["H"])
def _q_norm_rope(q, cos_sin, pos, out, H, eps):
    head = tl.program_id(0).to(tl.int64)  # row * H + head
    d = tl.arange(0, D)
    x = tl.load(q + head * D + d).to(tl.float32)
    # Rounded to bf16 before it is rotated.
    normed = (x * rms_scale(x, eps, D)).to(tl.bfloat16).to(tl.float32)
    position = tl.load(pos + head // H)
    y = rotate(tl.reshape(normed, (1, D)), cos_sin, position, NOPE_D // 2, 1, D, False)
    tl.store(out + head * D + d[None, :], y.to(tl.bfloat16))


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
    slot = tl.load(loc + row)
    if slot < 0:
        return
    d = tl.arange(0, D)[None, :]
    x = tl.load(kv + row * row_stride + d).to(tl.float32)
    y = x * rms_scale(x, eps, D) * tl.load(norm_w + d).to(tl.float32)
    y = rotate(y, cos_sin, tl.load(pos + row), NOPE_D // 2, 1, D, False)
    store_slot(y, codes, rope, scales, slot, stride, per_page)


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


_POOL = {"codes": "*fp8e4nv", "rope": "*bf16", "scales": "*u8"}
AOT = [
    AotEntry(
        name="qkv.q_norm_rope",
        fn=_q_norm_rope,
        signature={
            "q": "*bf16", "cos_sin": "*fp32", "pos": "*i64", "out": "*bf16", "H": "i32",
            "eps": "fp32",
        },
        constexprs={},
        divisible=("q", "cos_sin", "pos", "out"),
        num_warps=1, num_stages=1, expects_mma=False, hot=True,
    ),
    AotEntry(
        name="qkv.inv_rope",
        fn=_inv_rope,
        signature={"o": "*bf16", "cos_sin": "*fp32", "pos": "*i64", "out": "*bf16", "H": "i32"},
        constexprs={},
        divisible=("o", "cos_sin", "pos", "out"),
        num_warps=1, num_stages=1, expects_mma=False, hot=True,
    ),
    AotEntry(
        name="qkv.kv_norm_rope_store",
        fn=_kv_norm_rope_store,
        signature={
            "kv": "*bf16", "norm_w": "*bf16", "cos_sin": "*fp32", "pos": "*i64", "loc": "*i32",
            **_POOL, "row_stride": "i32", "stride": "i32", "per_page": "i32", "eps": "fp32",
        },
        constexprs={},
        divisible=(
            "kv", "norm_w", "cos_sin", "pos", "loc", *_POOL, "row_stride", "stride",
        ),
        num_warps=4, num_stages=1, expects_mma=False, hot=True,
    ),
]  # fmt: skip
