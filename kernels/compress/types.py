"""What the compressors of a layer read and write."""

from typing import NamedTuple

from torch import Tensor


class Stream(NamedTuple):
    """`Dh` is 512, or 128 of an indexer; C4 rows have two halves of 2 * Dh, C128 rows one."""

    s: Tensor  # f32 [T, halves * 2 * Dh] raw rows: values of each half, then scores of each half
    ape: Tensor  # f32 [terms, Dh] bias of the scores by place in the window
    state: Tensor  # f32 [rows, halves * 2 * Dh] ring, changed in place
    norm_w: Tensor  # [Dh]
    pool: Tensor  # changed in place


class CompressRows(NamedTuple):
    """Where the T rows of a forward, and the entries that close at them, stand."""

    # i32 [T, 4]: position, two numbers that say where the ring holds the rest of the row's window
    # (`c4_compress_pair`, `c128_compress`), row index in request
    plan: Tensor
    store: Tensor  # i32 [T] ring row that receives the raw row, -1 = not stored
    entry: Tensor  # i32 [T] slot of the entry that closes at this row, -1 = none
