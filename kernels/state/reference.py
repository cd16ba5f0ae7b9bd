"""Torch reference of the state ops; also the CPU production path."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
    offset = torch.arange(verify_rows, device=pool.device)
    rejected = (
        (offset >= commit_len[:, None]) & (offset < verify_len[:, None]) & (req_slot[:, None] >= 0)
    )
    rows = req_slot[:, None] * ring + (seq_len[:, None] + offset) % ring
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
