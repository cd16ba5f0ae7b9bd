"""Triton's side of `kv_pages.py`: storing a slot, and loading many."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.common.fp8 import AMAX_FLOOR, FP8_MAX
from dspark.kernels.common.fp8_kernel import to_e4m3
from dspark.kernels.common.kv_pages import DATA_BYTES, HEAD, NOPE, ROPE, SCALE_BYTES

D = tl.constexpr(HEAD)
NOPE_D = tl.constexpr(NOPE)
ROPE_D = tl.constexpr(ROPE)
SLOT = tl.constexpr(DATA_BYTES)
SCALES = tl.constexpr(SCALE_BYTES)
LIMIT = tl.constexpr(FP8_MAX)
FLOOR = tl.constexpr(AMAX_FLOOR)


class PoolViews(NamedTuple):
    """One packed pool in three types, as the kernels take it."""

    codes: Tensor  # e4m3
    rope: Tensor  # bf16
    scales: Tensor  # u8


def pool_views(pool: Tensor) -> PoolViews:
    """Raises ValueError for a plain pool, which only the reference reads."""
    if pool.dtype != torch.uint8:
        raise ValueError(f"GPU kernels read packed uint8 pools, got {pool.dtype}")
    return PoolViews(pool.view(torch.float8_e4m3fn), pool.view(torch.bfloat16), pool)


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
def load_slot_tile(codes, rope, scales, page, offset, stride, per_page, valid, N: tl.constexpr):
    """Slots (page, offset)[N] -> nope bf16 [N, 512] (zero from 448 on) and rope bf16 [N, 64].

    `codes`, `rope` and `scales` are e4m3, bf16 and u8 views of one pool; `stride` is in bytes.
    """
    d = tl.arange(0, D)
    r = tl.arange(0, ROPE_D)
    g = tl.arange(0, SCALES)
    row = page.to(tl.int64) * stride
    data = row + offset * SLOT
    nope_mask = valid[:, None] & (d < NOPE_D)[None, :]
    code = tl.load(codes + data[:, None] + d[None, :], mask=nope_mask, other=0.0)
    half = (data + NOPE_D) // 2
    rot = tl.load(rope + half[:, None] + r[None, :], mask=valid[:, None], other=0.0)
    at = row + per_page * SLOT + offset * SCALES
    group_mask = valid[:, None] & (g < SCALES - 1)[None, :]
    exponent = tl.load(scales + at[:, None] + g[None, :], mask=group_mask, other=0)
    # A UE8M0 byte is the exponent field of a bf16: the product is exact.
    scale = (exponent.to(tl.uint16) << 7).to(tl.bfloat16, bitcast=True)
    grouped = tl.reshape(code.to(tl.bfloat16), (N, SCALES, D // SCALES))
    nope = tl.reshape(grouped * scale[:, :, None], (N, D))
    return nope, rot
