"""Sixteen heads of a layer with compressed entries, in decode and in prefill."""

import torch

from dspark.kernels.attention import kernel
from dspark.kernels.attention.types import SlotList
from dspark.kernels.tooling.entries import Example, meta

ROWS, HEADS, PAGES = 3, 16, 4


def _attend(running: bool) -> None:
    kernel.mla_sparse(
        meta(torch.bfloat16, ROWS, HEADS, 512),
        _listed(149_504, 256, 128),
        _listed(37_376, 64, 512),
        meta(torch.float32, HEADS),
        512**-0.5,
        meta(torch.float32, 4096, 64),
        meta(torch.int64, ROWS),
        running=running,
    )


def _listed(stride: int, per_page: int, width: int) -> SlotList:
    return SlotList(
        meta(torch.uint8, PAGES, stride),
        per_page,
        meta(torch.int32, ROWS, width),
        meta(torch.int32, ROWS),
    )


def _decode() -> None:
    _attend(running=True)


def _prefill() -> None:
    _attend(running=False)


EXAMPLES = [
    Example("decode", kernel._decode, _decode, mma=True),
    Example("combine", kernel._combine, _decode),
    Example("gather", kernel._gather, _prefill),
    Example("prefill", kernel._prefill, _prefill, mma=True),
]
