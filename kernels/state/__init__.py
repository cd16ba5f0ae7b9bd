"""Emptying rows of the compressor rings, one launch for all layers.

A pool is one f32 (or bf16) tensor `[layers, rows, width]`; the first half of a row is kv, the
second half score. An empty row is kv 0 and score -inf: its softmax weight is exactly 0, and a
zeroed kv keeps a stale NaN from surviving that weight. All ops mutate the pools in place, are
idempotent, skip ids below 0 and accept empty lists.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.kernels.common.dispatch import op
from dspark.kernels.state import reference

__all__ = ["c128_rollback", "clear_blocks", "clear_pages", "clear_slots", "empty_rows"]

MAX_POOLS_A_CALL = 2  # C4 attention and C4 indexer live and die with the same page


def _width_fits_ring(pool: Tensor, ring: int, verify_width: int) -> None:
    _pool_fits(pool, ring)
    if not 0 < verify_width <= ring:
        raise ValueError(f"verify_width must be in 1..{ring} (the ring), got {verify_width}")


def _pools_fit(pools: Sequence[Tensor], ring: int) -> None:
    if not 1 <= len(pools) <= MAX_POOLS_A_CALL:
        raise ValueError(f"one or two pools a call, got {len(pools)}")
    for pool in pools:
        _pool_fits(pool, ring)


def _pool_fits(pool: Tensor, ring: int) -> None:
    shape = list(pool.shape)
    if pool.dim() != 3 or shape[2] % 2 or ring < 1 or shape[1] % ring or not pool.is_contiguous():
        raise ValueError(
            f"a state pool is contiguous [layers, owners * {ring}, even width], got {shape}"
        )


c128_rollback = op(reference.c128_rollback, check=_width_fits_ring)
clear_blocks = op(reference.clear_blocks, check=_pools_fit)


def clear_slots(pools: Tensor | Sequence[Tensor], slots: Tensor, *, ring: int) -> None:
    """Empty the rings of request slots: rows [slot * ring, (slot + 1) * ring) of every layer.

    Args:
        pools: one pool, or two pools with the same ring, each [layers, slots * ring, width].
        slots: int [n], below 0 = nothing.
    """
    clear_blocks(_listed(pools), slots, ring=ring)


def clear_pages(pools: Tensor | Sequence[Tensor], pages: Tensor, *, ring: int) -> None:
    """Empty the rings of SWA pages: rows [page * ring, (page + 1) * ring) of every layer.

    Args:
        pools: the C4 attention pool, the C4 indexer pool, or both, each [layers, pages * ring, w].
        pages: int [n], below 0 = nothing.
    """
    clear_blocks(_listed(pools), pages, ring=ring)


def empty_rows(layers: int, rows: int, width: int, device: torch.device | str) -> Tensor:
    """A pool of empty rows, f32 [layers, rows, width]."""
    pool = torch.zeros(layers, rows, width, device=device)
    pool[..., width // 2 :] = -torch.inf
    return pool


def _listed(pools: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [pools] if isinstance(pools, Tensor) else list(pools)
