"""Routed experts as they are prepared, and the route to them."""

from typing import NamedTuple

import torch


class ExpertWeights(NamedTuple):
    """Routed experts of one layer, one rank's slice of I.

    For the reference as in the checkpoint (low nibble = even column), on a CPU decoded once; for
    the kernels rearranged into tiles [E, N/16, blocks, 16, ...] of words i32 and of scales u8
    (`words.py`).
    """

    w13: torch.Tensor  # u8 [E, 2I, Hd/2]: gate rows then up rows
    s13: torch.Tensor  # u8 E8M0 [E, 2I, Hd/32]
    w2: torch.Tensor  # u8 [E, Hd, I/2]
    s2: torch.Tensor  # u8 E8M0 [E, Hd, I/32]
    dense13: torch.Tensor | None  # f64 [E, 2I, Hd]
    dense2: torch.Tensor | None  # f64 [E, Hd, I]

    @property
    def hidden(self) -> int:
        return _rows(self.w2)

    @property
    def width(self) -> int:
        return _rows(self.w13) // 2


def _rows(matrix: torch.Tensor) -> int:
    return matrix.shape[1] * (matrix.shape[3] if matrix.ndim == 5 else 1)


class Route(NamedTuple):
    """Experts of each row in ascending id, which is also the order of the final sum."""

    weights: torch.Tensor  # f32 [T, k]
    experts: torch.Tensor  # i32 [T, k]; -1 with weight 0 on padded rows
