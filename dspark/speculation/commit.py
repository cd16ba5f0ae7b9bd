"""Which rows of a verify step become part of their request."""

import torch


def committed_slots(window_slots: torch.Tensor, commit_len: torch.Tensor) -> torch.Tensor:
    """i32 [R * V] window slots of the committed rows; -1 where a row was rejected.

    Args:
        window_slots: int [R, V] window slot of each verify row.
        commit_len: i32 [R] rows that are committed, from the first on.
    """
    row = torch.arange(window_slots.shape[1], device=window_slots.device)
    kept = torch.where(row < commit_len[:, None], window_slots, -1)
    return kept.to(torch.int32).flatten()
