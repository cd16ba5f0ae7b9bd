"""Torch reference of the ordered sum; also the CPU production path."""

from torch import Tensor

FOUR = 4


def ordered_sum(gathered: Tensor) -> Tensor:
    """Sum of [ranks, ...] over ranks in fp32, rounded once to the dtype of `gathered`.

    Four ranks are added in ascending order, then the fours are: (p0 + p1 + p2 + p3) + (p4 + ...).
    Two sockets of four cards each can then add up their own and exchange one sum.
    """
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
