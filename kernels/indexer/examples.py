"""Indexer of 64 heads that takes 512 entries, over histories of one, two and three levels."""

import torch

from dspark.kernels.common.index_pages import PACKED_STRIDE
from dspark.kernels.indexer import kernel
from dspark.kernels.indexer.types import IndexQuery
from dspark.kernels.tooling.entries import Example, meta

ROWS, REQUESTS, PAGES, HEADS, TOP = 3, 2, 1001, 64, 512
SHORT, LONG, LONGEST = 4001, 8001, 64_001  # entries


def _query() -> None:
    kernel.index_q(
        meta(torch.bfloat16, ROWS, HEADS, 128),
        meta(torch.float32, ROWS, HEADS),
        meta(torch.float32, 4096, 64),
        meta(torch.int64, ROWS),
    )


def _logits() -> None:
    kernel.index_logits(
        IndexQuery(meta(torch.float8_e4m3fn, ROWS, HEADS, 128), meta(torch.float32, ROWS, HEADS)),
        meta(torch.uint8, 4, PACKED_STRIDE),
        meta(torch.int32, REQUESTS, PAGES),
        meta(torch.int32, ROWS),
        meta(torch.int32, ROWS),
        LONG,
    )


def _topk(entries: int) -> None:
    kernel.index_topk(
        meta(torch.float32, ROWS, entries),
        meta(torch.int32, ROWS),
        meta(torch.int32, REQUESTS, PAGES),
        meta(torch.int32, ROWS),
        TOP,
    )


def _one_level() -> None:
    _topk(SHORT)


def _three_levels() -> None:
    _topk(LONGEST)


EXAMPLES = [
    Example("query", kernel._query, _query),
    Example("logits", kernel._logits, _logits, mma=True),
    Example("topk[only]", kernel._topk, _one_level),
    Example("topk[first]", kernel._topk, _three_levels),
    Example("topk[middle]", kernel._topk, _three_levels, launch=1),
    Example("topk[last]", kernel._topk, _three_levels, launch=2),
]
