"""Triton twin of `elementary.py`: the same bits, as no product is fused into a sum."""

import triton
import triton.language as tl

from dspark.kernels.common import elementary

LOG = tl.constexpr(elementary.LOG)
EXP2 = tl.constexpr(elementary.EXP2)
SQRT_2_BITS = tl.constexpr(elementary.SQRT_2_BITS)
LN2_HIGH = tl.constexpr(elementary.LN2_HIGH)
LN2_LOW = tl.constexpr(elementary.LN2_LOW)
UNIT = tl.constexpr(elementary.UNIT)


@triton.jit
def _polynomial(COEFFICIENTS: tl.constexpr, DEGREE: tl.constexpr, x):
    value = x * 0.0 + COEFFICIENTS[DEGREE]
    for i in tl.static_range(DEGREE):
        value = value * x + COEFFICIENTS[DEGREE - 1 - i]
    return value


@triton.jit
def log(x):
    """Natural logarithm of f32, positive and normal."""
    bits = x.to(tl.int32, bitcast=True)
    mantissa = bits & 0x7FFFFF
    up = ((mantissa | 0x3F800000) >= SQRT_2_BITS).to(tl.int32)
    exponent = ((bits >> 23) - 127 + up).to(tl.float32)
    r = (mantissa | ((127 - up) << 23)).to(tl.float32, bitcast=True) - 1
    square = r * r
    tail = square * r * _polynomial(LOG, 7, r) - square * 0.5
    return exponent * LN2_HIGH + (exponent * LN2_LOW + tail + r)


@triton.jit
def weight(y):
    """2^y for f32 y <= 0 as i64 in units of 2^-UNIT; NaN and below -UNIT: 0."""
    y = tl.where(y >= -UNIT, y, -UNIT - 1.0)
    whole = tl.floor(y)
    f = y - whole
    mantissa = ((_polynomial(EXP2, 5, f) * f + 1) * 8388608.0).to(tl.int64)  # 2^23
    return (mantissa << (UNIT - 23)) >> (-whole).to(tl.int64)
