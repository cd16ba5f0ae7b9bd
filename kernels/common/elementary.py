"""Logarithm and powers of two that come out alike on every machine.

Only bit shifts, f32 products and f32 sums, each rounded once: a library's `log` differs from
another's in the last bit, and a vectorised one in the tail of an array. A sampled token may hang on
that bit. Triton twin: `elementary_kernel.py`, the same bits.
"""

import torch
from torch import Tensor

# log(1 + r) = r - r^2 / 2 + r^3 * polynomial(r) for 1 + r in [sqrt(1/2), sqrt(2)), lowest first.
LOG = (
    0.333333283662796,
    -0.2500084638595581,
    0.200014129281044,
    -0.1662275195121765,
    0.14197872579097748,
    -0.13161613047122955,
    0.12786364555358887,
    -0.07660843431949615,
)
# 2^f = 1 + f * polynomial(f) for f in [0, 1).
EXP2 = (
    0.6931471824645996,
    0.24022722244262695,
    0.055495936423540115,
    0.009652440436184406,
    0.0012689348077401519,
    0.0002082920982502401,
)
SQRT_2_BITS = 0x3FB504F3
# ln 2 in two parts: any exponent times the first is exact in f32.
LN2_HIGH, LN2_LOW = 0.693359375, -0.00021219444170128554

LOG2_E = 1.4426950216293335
UNIT = 40  # a weight of 1 is 2^40, see `weight`


def log(x: Tensor) -> Tensor:
    """Natural logarithm of f32 [...], relative error below 2^-22. x: positive and normal."""
    bits = x.view(torch.int32)
    mantissa = bits & 0x7FFFFF
    # [sqrt(1/2), sqrt(2)): the upper half of the mantissas counts for the next exponent.
    up = ((mantissa | 0x3F800000) >= SQRT_2_BITS).to(torch.int32)
    exponent = ((bits >> 23) - 127 + up).float()
    r = (mantissa | ((127 - up) << 23)).view(torch.float32) - 1
    square = r * r
    tail = square * r * _polynomial(LOG, r) - square * 0.5
    return exponent * LN2_HIGH + (exponent * LN2_LOW + tail + r)


def weight(y: Tensor) -> Tensor:
    """2^y for f32 y <= 0 as i64 in units of 2^-40; NaN and below -40: 0.

    Integers add up to the same sum in every order: 2^21 of them cannot overflow.
    """
    y = torch.where(y >= -UNIT, y, -UNIT - 1.0)
    whole = y.floor()
    f = y - whole
    mantissa = ((_polynomial(EXP2, f) * f + 1) * 2.0**23).long()  # in [2^23, 2^24]
    return (mantissa << (UNIT - 23)) >> (-whole).long()


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    value = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value
