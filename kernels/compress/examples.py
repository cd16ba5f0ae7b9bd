"""Compressors of a C4 layer, for few rows and for many, and of a C128 layer."""

import torch

from dspark.kernels.common.index_pages import PACKED_STRIDE
from dspark.kernels.compress import kernel
from dspark.kernels.compress.types import CompressRows, Stream
from dspark.kernels.tooling.entries import Example, meta

ROWS, RING, PAGES = 3, 17, 4


def _stream(width: int, terms: int, halves: int, page_bytes: int) -> Stream:
    columns = 2 * halves * width
    return Stream(
        meta(torch.float32, ROWS, columns),
        meta(torch.float32, terms, width),
        meta(torch.float32, RING, columns),
        meta(torch.bfloat16, width),
        meta(torch.uint8, PAGES, page_bytes),
    )


def _addresses() -> tuple[CompressRows, torch.Tensor]:
    """rows, cos_sin."""
    rows = CompressRows(
        meta(torch.int32, ROWS, 4), meta(torch.int32, ROWS), meta(torch.int32, ROWS)
    )
    return rows, meta(torch.float32, 4096, 64)


def _c4() -> None:
    main, index = _stream(512, 8, 2, 37_376), _stream(128, 8, 2, PACKED_STRIDE)
    kernel.c4_compress_pair(main, index, *_addresses(), running=False)


def _c128() -> None:
    kernel.c128_compress(_stream(512, 128, 1, 1168), *_addresses())


EXAMPLES = [
    Example("c4_step", kernel._c4_step, _c4),
    Example("store_rows[c4]", kernel._store_rows, _c4),
    Example("store_rows[c4 index]", kernel._store_rows, _c4, launch=1),
    Example("form_c128", kernel._form_c128, _c128),
    Example("finish_c128", kernel._finish_c128, _c128),
]
