"""Compressors that turn closed windows of tokens into one cache entry each.

A raw row is (kv, score) of one token, before the position bias `ape`. Rows of this forward come
in as `s`; older rows of a still open window wait in a ring (`state`). The entry of a window is
sum_j kv_j * softmax_j(score_j + ape_j) per channel, RMS-normed, rotated at the position of the
window's first token and stored. Windows:

* C4 overlaps: 8 rows, the A halves of the previous 4 tokens and the B halves of its own 4;
* C128 does not: its own 128 rows.
"""

import torch

from dspark.kernels.common.dispatch import op
from dspark.kernels.compress import reference
from dspark.kernels.compress.types import CompressRows, Stream

__all__ = ["CompressRows", "Stream", "c4_compress_pair", "c128_compress", "rows_fit_ring"]


def rows_fit_ring(rows_per_request: int, ring: int) -> bool:
    """True when no raw row of a forward lands where a C4 entry of the same forward still reads.

    An entry reads back to position p - 7; the row that takes its ring row is at p - 7 + ring.
    """
    return rows_per_request <= ring - 7


def _pair_fits(main: Stream, index: Stream, rows: CompressRows) -> None:
    for stream in (main, index):
        _stream_fits(stream, rows, terms=8, halves=2)


def _c128_fits(stream: Stream, rows: CompressRows) -> None:
    _stream_fits(stream, rows, terms=128, halves=1)


def _stream_fits(stream: Stream, rows: CompressRows, *, terms: int, halves: int) -> None:
    s, ape, state, norm_w, _ = stream
    count, width = s.shape[0], norm_w.shape[0]
    columns = 2 * halves * width
    if s.shape != (count, columns) or state.shape[1] != columns or ape.shape != (terms, width):
        raise ValueError(
            f"a {width}-wide compressor needs s and state [*, {columns}] and ape "
            f"[{terms}, {width}], got {list(s.shape)}, {list(state.shape)} and {list(ape.shape)}"
        )
    shapes = [list(part.shape) for part in rows]
    if shapes != [[count, 4], [count], [count]]:
        raise ValueError(f"plan, store and entry must cover {count} rows, got {shapes}")
    if s.dtype != torch.float32 or state.dtype != torch.float32:
        raise ValueError(f"raw rows and ring must be f32, got {s.dtype} and {state.dtype}")


c4_compress_pair = op(reference.c4_compress_pair, check=_pair_fits)
c128_compress = op(reference.c128_compress, check=_c128_fits)
