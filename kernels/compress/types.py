"""What one compressor of a layer reads and writes."""

from typing import NamedTuple

from torch import Tensor


class Stream(NamedTuple):
    """`Dh` is 512, or 128 of an indexer; C4 rows have two halves of 2 * Dh, C128 rows one."""

    s: Tensor  # f32 [T, halves * 2 * Dh] raw rows: values of each half, then scores of each half
    ape: Tensor  # f32 [terms, Dh] bias of the scores by place in the window
    state: Tensor  # f32 [rows, halves * 2 * Dh] ring, changed in place
    norm_w: Tensor  # [Dh]
    pool: Tensor  # changed in place
