"""Result of `cut_tails`."""

from typing import NamedTuple

from torch import Tensor


class Cut(NamedTuple):
    """Which tokens of each row may be drawn: those with a logit above `value`, and of those that
    equal it the ids up to `last`."""

    value: Tensor  # f32 [T]
    last: Tensor  # i64 [T]
