"""What distinguishes the two compressors of a C4 layer."""

from typing import NamedTuple

from torch import Tensor


class C4Stream(NamedTuple):
    s: Tensor  # f32 [T, 4 * Dh] raw rows
    ape: Tensor  # f32 [8, Dh]
    state: Tensor  # f32 [rows, 4 * Dh] ring, changed in place
    norm_w: Tensor  # [Dh]
    pool: Tensor  # changed in place
