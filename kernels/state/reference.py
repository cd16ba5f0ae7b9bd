"""Torch reference of K29; also the CPU production path."""

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
    offset = torch.arange(verify_rows, device=pool.device)
    rejected = (
        (offset >= commit_len[:, None]) & (offset < verify_len[:, None]) & (req_slot[:, None] >= 0)
    )
    rows = req_slot[:, None] * ring + (seq_len[:, None] + offset) % ring
    _empty(pool, rows[rejected])


def clear_blocks(pools: Sequence[Tensor], owners: Tensor, *, ring: int) -> None:
    rows = owners[owners >= 0, None].long() * ring + torch.arange(ring, device=owners.device)
    for pool in pools:
        _empty(pool, rows.flatten())


def _empty(pool: Tensor, rows: Tensor) -> None:
    half = pool.shape[2] // 2
    pool[:, rows, :half] = 0
    pool[:, rows, half:] = -torch.inf
