"""Triton twin of the counter-based generator in `rng.py`: the same bits.

All words are uint32; a stream is the pair of lanes (a, b).
"""

import triton
import triton.language as tl

from dspark.kernels.common import rng
from dspark.kernels.common.elementary_kernel import log

ACCEPT = tl.constexpr(rng.ACCEPT)
RESAMPLE = tl.constexpr(rng.RESAMPLE)
TOKEN = tl.constexpr(rng.TOKEN)
DRAFT = tl.constexpr(rng.DRAFT)
GOLDEN = tl.constexpr(rng.GOLDEN)
# The first link of each chain starts from a constant.
FIRST_A = tl.constexpr((rng.START_A + rng.GOLDEN) & rng.MASK)
FIRST_B = tl.constexpr((rng.START_B + rng.GOLDEN) & rng.MASK)


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _lane(first, low, high, position, purpose):
    state = _mix(low ^ first)
    state = _mix((state + GOLDEN) ^ high)
    state = _mix((state + GOLDEN) ^ position)
    return _mix((state + GOLDEN) ^ purpose)


@triton.jit
def stream(seed, position, purpose):
    """(a, b) of seed i64, position int and purpose int, all of one shape."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    position = position.to(tl.uint32)
    purpose = (position * 0 + purpose).to(tl.uint32)
    a = _lane(FIRST_A, low, high, position, purpose)
    return a, _lane(FIRST_B, low, high, position, purpose)


@triton.jit
def bits(a, b, token):
    return _mix(a ^ _mix(b + token.to(tl.uint32) * GOLDEN))


@triton.jit
def uniform(a, b):
    """f32 in [0, 1), token 0."""
    return (_mix(a ^ _mix(b)) >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def exponential(a, b, token):
    """f32 standard exponential, positive and finite."""
    u = (bits(a, b, token).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    u = tl.minimum(u, 0.999999940395355224609375)  # 1 - 2^-24
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    return tl.where(u < 0.0625, series, -log(1 - u))


@triton.jit
def gumbel(a, b, token):
    """f32 standard Gumbel noise in [-3, 23]."""
    return -log(exponential(a, b, token))
