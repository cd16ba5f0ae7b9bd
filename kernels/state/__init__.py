"""K29: emptying rows of the compressor rings, one launch for all layers.

A pool is one f32 (or bf16) tensor `[layers, rows, width]`; the first half of a row is kv, the
second half score. An empty row is kv 0 and score -inf: its softmax weight is exactly 0, and a
zeroed kv keeps a stale NaN from surviving that weight. All three calls mutate the pools in place,
are idempotent, skip ids below 0 and accept empty lists.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.kernels.common.dispatch import use_triton

MAX_POOLS_A_CALL = 2  # C4 attention and C4 indexer live and die with the same page


def c128_rollback(
    pool: Tensor,
    req_slot: Tensor,
    seq_len: Tensor,
    commit_len: Tensor,
    verify_len: Tensor,
    *,
    ring: int,
    verify_rows: int,
) -> None:
    """Empty the C128 rows of rejected drafts: offsets [commit_len, verify_len) of each request.

    Args:
        pool: [layers, slots * ring, width], mutated.
        req_slot: i64 [R], -1 = padded request.
        seq_len: i64 [R], length before the verify step (position of its first row).
        commit_len, verify_len: int [R], rows kept (accepted drafts + 1) and rows run.
        ring: rows per slot. verify_rows: static bound on verify_len, gamma + 1.

    Raises:
        ValueError: on a pool of the wrong shape, or verify_rows beyond the ring.
    """
    _check_pool(pool, ring)
    if not 0 < verify_rows <= ring:
        raise ValueError(f"verify_rows must be in 1..{ring} (the ring), got {verify_rows}")
    if use_triton(pool):
        from dspark.kernels.state.kernel import c128_rollback as implementation
    else:
        from dspark.kernels.state.reference import c128_rollback as implementation
    implementation(
        pool, req_slot, seq_len, commit_len, verify_len, ring=ring, verify_rows=verify_rows
    )


def clear_slots(pools: Tensor | Sequence[Tensor], slots: Tensor, *, ring: int) -> None:
    """Empty the rings of request slots: rows [slot * ring, (slot + 1) * ring) of every layer.

    Args:
        pools: one pool, or two pools with the same ring, each [layers, slots * ring, width].
        slots: int [n], below 0 = nothing.
    """
    _clear(pools, slots, ring)


def clear_pages(pools: Tensor | Sequence[Tensor], pages: Tensor, *, ring: int) -> None:
    """Empty the rings of SWA pages: rows [page * ring, (page + 1) * ring) of every layer.

    Args:
        pools: the C4 attention pool, the C4 indexer pool, or both, each [layers, pages * ring, w].
        pages: int [n], below 0 = nothing.
    """
    _clear(pools, pages, ring)


def empty_rows(layers: int, rows: int, width: int, device: torch.device | str) -> Tensor:
    """A pool of empty rows, f32 [layers, rows, width]."""
    pool = torch.zeros(layers, rows, width, device=device)
    pool[..., width // 2 :] = -torch.inf
    return pool


def _clear(pools: Tensor | Sequence[Tensor], owners: Tensor, ring: int) -> None:
    pool_list = [pools] if isinstance(pools, Tensor) else list(pools)
    if not 1 <= len(pool_list) <= MAX_POOLS_A_CALL:
        raise ValueError(f"one or two pools a call, got {len(pool_list)}")
    for pool in pool_list:
        _check_pool(pool, ring)
    if use_triton(pool_list[0]):
        from dspark.kernels.state.kernel import clear_blocks as implementation
    else:
        from dspark.kernels.state.reference import clear_blocks as implementation
    implementation(pool_list, owners, ring=ring)


def _check_pool(pool: Tensor, ring: int) -> None:
    shape = list(pool.shape)
    if pool.dim() != 3 or shape[2] % 2 or ring < 1 or shape[1] % ring or not pool.is_contiguous():
        raise ValueError(
            f"a state pool is contiguous [layers, owners * {ring}, even width], got {shape}"
        )
