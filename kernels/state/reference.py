"""Torch reference of the state ops; also the CPU production path."""

from collections.abc import Sequence

import torch
from torch import Tensor


def c128_rollback(
    pool: Tensor,
    request_slot: Tensor,
    committed: Tensor,
    commit_len: Tensor,
    rows_run: Tensor,
    *,
    ring: int,
    verify_width: int,
) -> None:
    """Empty the C128 rows of rejected drafts: offsets [commit_len, rows_run) of each request.

    Args:
        pool: [layers, slots * ring, width], mutated.
        request_slot: i64 [R], -1 = padded request.
        committed: i64 [R], position of the first row of the verify step.
        commit_len, rows_run: int [R], rows kept (accepted drafts + 1) and rows run.
        ring: rows per slot. verify_width: static bound on rows_run, depth + 1.

    Raises:
        ValueError: on a pool of the wrong shape, or verify_width beyond the ring.
    """
    offset = torch.arange(verify_width, device=pool.device)
    rejected = (
        (offset >= commit_len[:, None])
        & (offset < rows_run[:, None])
        & (request_slot[:, None] >= 0)
    )
    rows = request_slot[:, None] * ring + (committed[:, None] + offset) % ring
    _empty(pool, rows[rejected])


def clear_blocks(pools: Sequence[Tensor], owners: Tensor, *, ring: int) -> None:
    """Empty the ring of every owner: rows [owner * ring, (owner + 1) * ring) of every layer.

    Args:
        pools: one or two, each [layers, owners * ring, width], mutated.
        owners: int [n], below 0 = nothing.

    Raises:
        ValueError: on another number of pools, or a pool of the wrong shape.
    """
    rows = owners[owners >= 0, None].long() * ring + torch.arange(ring, device=owners.device)
    for pool in pools:
        _empty(pool, rows.flatten())


def _empty(pool: Tensor, rows: Tensor) -> None:
    half = pool.shape[2] // 2
    pool[:, rows, :half] = 0
    pool[:, rows, half:] = -torch.inf
