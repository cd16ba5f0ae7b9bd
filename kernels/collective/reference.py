"""Torch reference of the ordered sum."""

from torch import Tensor


def ordered_sum(gathered: Tensor) -> Tensor:
    total = gathered[0].float()
    for part in gathered[1:]:
        total = total + part.float()
    return total.to(gathered.dtype)
