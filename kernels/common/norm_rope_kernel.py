"""Triton twin of `norm_rope.py`."""

import triton
import triton.language as tl

from dspark.kernels.common import norm_rope

ROPE_D = tl.constexpr(norm_rope.ROPE)


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
