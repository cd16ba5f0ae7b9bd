"""How many draft rows of each request the target verifies, under a token budget."""

import torch
from torch import Tensor

from dspark.kernels.common.dispatch import op
from dspark.kernels.schedule import reference

__all__ = ["schedule"]


def _bounds_fit(confidence: Tensor, min_len: int, max_len: int | None) -> None:
    if confidence.dim() != 2 or confidence.dtype != torch.float32:
        raise ValueError(
            f"confidence must be f32 [requests, gamma], got {confidence.dtype} "
            f"{list(confidence.shape)}"
        )
    gamma = confidence.shape[1]
    max_len = gamma + 1 if max_len is None else max_len
    if not 1 <= min_len <= max_len <= gamma + 1:
        raise ValueError(
            f"need 1 <= min_len <= max_len <= gamma + 1 = {gamma + 1}, got {min_len} and {max_len}"
        )


schedule = op(reference.schedule, check=_bounds_fit)
