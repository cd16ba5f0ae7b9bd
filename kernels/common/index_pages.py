"""Index keys: how they are rotated and quantised, and the byte layout of their pool.

There is one 128-wide key per C4 entry, 64 keys a page.

A packed page is 64 * 128 e4m3 bytes, then 64 f32 scales; a plain float32 page `[64 * 128]` keeps
values unrounded for full-precision comparisons.
"""

from functools import lru_cache

import torch
from torch import Tensor

from dspark.kernels.common.fp8 import AMAX_FLOOR, FP8_MAX, decode_e4m3

WIDTH = 128
KEYS = 64  # per page
PACKED_STRIDE = KEYS * (WIDTH + 4)  # bytes


@lru_cache(maxsize=8)
def _hadamard_matrix(device: torch.device) -> Tensor:
    """f64 [128, 128] orthonormal Hadamard matrix, Sylvester order."""
    h = torch.ones(1, 1, dtype=torch.float64, device=device)
    while h.shape[0] < WIDTH:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h / WIDTH**0.5


def hadamard(x: Tensor) -> Tensor:
    """x f64 [..., 128] times the orthonormal Hadamard matrix: spreads outliers before fp8."""
    return x @ _hadamard_matrix(x.device)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes [..., 128] and f32 scales [...] of x f32 [..., 128]; scale max(1e-4, amax)/448."""
    scale = x.abs().amax(-1).clamp(min=AMAX_FLOOR) / FP8_MAX
    codes = (x / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes, scale


def store_index(pool: Tensor, slot: Tensor, key: Tensor) -> None:
    """Write key[E, 128] f32 into slots slot[E] >= 0."""
    slot = slot.long()
    if pool.dtype == torch.float32:
        pool.view(-1, WIDTH)[slot] = key
        return
    codes, scale = quantise(key)
    page, offset = slot // KEYS, slot % KEYS
    _codes(pool)[page, offset] = codes.view(torch.uint8)
    pool.view(torch.float32)[page, KEYS * WIDTH // 4 + offset] = scale


def load_index(pool: Tensor, pages: Tensor) -> tuple[Tensor, Tensor | None]:
    """f64 unscaled keys [len(pages) * 64, 128] and f64 scales [len(pages) * 64] (None if plain)."""
    chosen = pool[pages]
    if pool.dtype == torch.float32:
        return chosen.view(-1, WIDTH).double(), None
    keys = decode_e4m3(chosen[:, : KEYS * WIDTH]).view(-1, WIDTH).double()
    scales = chosen.view(torch.float32)[:, KEYS * WIDTH // 4 :].double()
    return keys, scales.flatten()


def _codes(pool: Tensor) -> Tensor:
    """[pages, 64, 128] uint8 view of a packed pool's codes."""
    return pool.as_strided((pool.shape[0], KEYS, WIDTH), (pool.shape[1], WIDTH, 1))
