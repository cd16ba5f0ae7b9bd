"""Counter-based random numbers: a pure function of (seed, position, purpose, token).

No state is kept, so a request draws the same numbers alone or in a batch, on every rank and in
every launch shape. The hash uses 32-bit multiply, xor and shift only (Triton twin: `rng_kernel.py`,
the same bits). Two independent 32-bit lanes name the stream; two streams coincide with
probability 2^-64.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.kernels.common import elementary

# Purposes: draws that must be independent of each other at one position.
ACCEPT = 1  # the uniform that accepts or rejects a draft token
RESAMPLE = 2  # the token drawn after a rejection, or after the last accepted draft
TOKEN = 3  # the token at a position, where drafts are judged by that draw itself
DRAFT = 16  # DRAFT + k: proposal k of a block, so a position drafted again draws afresh

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
START_A, START_B = 0x243F6A88, 0x85A308D3


class Stream(NamedTuple):
    """Names of independent streams; i64 tensors holding u32 values."""

    a: Tensor
    b: Tensor


def stream(seed: Tensor, position: Tensor, purpose: int | Tensor) -> Stream:
    """Stream of each element. seed: i64, all 64 bits used. position: i64 below 2^32.

    All arguments broadcast.
    """
    words = [seed & MASK, (seed >> 32) & MASK, position & MASK, purpose]
    return Stream(_chain(words, START_A), _chain(words, START_B))


def bits(of: Stream, token: Tensor | int = 0) -> Tensor:
    """32 random bits for each token id, as i64."""
    return _mix(of.a ^ _mix((of.b + token * GOLDEN) & MASK))


def uniform(of: Stream, token: Tensor | int = 0) -> Tensor:
    """f32 in [0, 1), a multiple of 2^-24."""
    return (bits(of, token) >> 8).float() * 2.0**-24


def exponential(of: Stream, token: Tensor) -> Tensor:
    """f32 standard exponential, positive and finite, fine-grained near 0 where races are won."""
    u = ((bits(of, token).float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    return torch.where(u < 1 / 16, series, -elementary.log(1 - u))


def gumbel(of: Stream, token: Tensor) -> Tensor:
    """f32 standard Gumbel noise in [-3, 23]: minus the log of `exponential`.

    The argmax of log-probability + noise is a sample (an exponential race seen in logarithms).
    """
    return -elementary.log(exponential(of, token))


def _chain(words: list[Tensor | int], start: int) -> Tensor:
    state: Tensor | int = start
    for word in words:
        state = _mix(((state + GOLDEN) & MASK) ^ word)
    assert isinstance(state, Tensor)
    return state


def _mix(x: Tensor | int) -> Tensor:
    """Full-avalanche finaliser of MurmurHash3 on u32 values held in i64."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & MASK
    return x ^ (x >> 16)  # type: ignore[return-value]
