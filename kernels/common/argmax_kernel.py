"""Triton twin of `argmax.py`: a (value, token id) pair in one i64."""

import triton
import triton.language as tl

from dspark.kernels.common import argmax

NOTHING = tl.constexpr(argmax.NOTHING)


@triton.jit
def pack(value, token):
    """f32 value, token id -> i64 ordered by (value, smaller id); NaN and -inf give NOTHING."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0.0 makes -0 equal to 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    packed = (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64))
    return tl.where(value > -float("inf"), packed, NOTHING)


@triton.jit
def token_of(packed):
    """Token id of a packed pair, i64; 0 for NOTHING."""
    return tl.where(packed == NOTHING, 0, 0xFFFFFFFF - (packed & 0xFFFFFFFF))
