"""Triton's side of `index_pages.py`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.common.fp8 import AMAX_FLOOR, FP8_MAX
from dspark.kernels.common.fp8_kernel import to_e4m3
from dspark.kernels.common.index_pages import KEYS, WIDTH

W = tl.constexpr(WIDTH)
PAGE_KEYS = tl.constexpr(KEYS)
LIMIT = tl.constexpr(FP8_MAX)
FLOOR = tl.constexpr(AMAX_FLOOR)


class IndexViews(NamedTuple):
    """One packed index pool in two types, as the kernels take it."""

    codes: Tensor  # e4m3
    scales: Tensor  # f32


def index_views(pool: Tensor) -> IndexViews:
    """Raises ValueError for a plain pool, which only the reference reads."""
    if pool.dtype != torch.uint8:
        raise ValueError(f"GPU kernels read packed uint8 pools, got {pool.dtype}")
    return IndexViews(pool.view(torch.float8_e4m3fn), pool.view(torch.float32))


@triton.jit
def _butterfly(x, N: tl.constexpr, SPAN: tl.constexpr):
    """Sums and differences of the values SPAN apart."""
    pairs = tl.permute(tl.reshape(x, (N, W // (2 * SPAN), 2, SPAN)), (0, 1, 3, 2))
    low, high = tl.split(pairs)
    pairs = tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2))
    return tl.reshape(pairs, (N, W))


@triton.jit
def hadamard(x, N: tl.constexpr):
    """Orthonormal 128-point Hadamard transform, Sylvester order, of x f32 [N, 128]."""
    for stage in tl.static_range(7):
        x = _butterfly(x, N, 1 << stage)
    return x * 0.08838834764831845  # 128 ** -0.5


@triton.jit
def quantise_keys(x):
    """e4m3 codes [N, 128] and f32 scales [N] of x f32 [N, 128]."""
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), FLOOR), LIMIT)
    return to_e4m3(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))), scale
