"""Triton's side of `fp8.py`: the one f32 -> e4m3 conversion of all kernels."""

import triton
import triton.language as tl

from dspark.kernels.common.dispatch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def to_e4m3(x):
    """e4m3 codes of x f32: rounded once to nearest even, saturated at +-448; NaN stays NaN.

    On sm_89 Triton's own cast truncates to fp16 first, and a value just above a border between
    two codes then falls to the lower one. The hardware converts f32 directly.
    """
    if _INTERPRETED:
        return x.to(tl.float8e4nv)
    return tl.inline_asm_elementwise(
        """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
        }""",
        "=r,r,r,r,r",
        [x],
        dtype=tl.float8e4nv,
        is_pure=True,
        pack=4,
    )
