"""Torch reference of the ordered sum."""

from torch import Tensor

FOUR = 4


def ordered_sum(gathered: Tensor) -> Tensor:
    fours = []
    for first in range(0, len(gathered), FOUR):
        four = gathered[first].float()
        for part in gathered[first + 1 : first + FOUR]:
            four = four + part.float()
        fours.append(four)
    total = fours[0]
    for four in fours[1:]:
        total = total + four
    return total.to(gathered.dtype)
