"""Addresses of a target step in its three forms, and of blocks of five drafts."""

import torch

from dspark.kernels.step import kernel
from dspark.kernels.step.types import BatchRows, BlockRows, Bounds, Rings, Tables
from dspark.kernels.tooling.entries import Example, meta

R, ROWS, SLOTS, TOKENS = 3, 18, 9, 4097


# Odd sizes throughout: none is part of the binary.
TABLES = Tables(meta(torch.int32, SLOTS, TOKENS), meta(torch.int64, TOKENS))
BOUNDS = Bounds(window=127, max_pages=17, max_c128=33, page=257)
RINGS = Rings(c4=17, c128=137)


def _per_request() -> torch.Tensor:
    return meta(torch.int64, R)


def _step(width: int | None, store_all: bool) -> None:
    rows = BatchRows(_per_request(), _per_request(), _per_request(), ROWS, width)
    kernel.step_meta(rows, TABLES, BOUNDS, RINGS, store_all=store_all)


def _verify() -> None:
    _step(width=ROWS // R, store_all=True)


def _decode() -> None:
    _step(width=None, store_all=True)


def _prefill() -> None:
    _step(width=None, store_all=False)


def _draft() -> None:
    rows = BlockRows(_per_request(), _per_request(), _per_request(), gamma=5)
    kernel.draft_meta(rows, TABLES, window=BOUNDS.window)


EXAMPLES = [
    Example("step_meta[verify]", kernel._step_meta, _verify),
    Example("step_meta[decode]", kernel._step_meta, _decode),
    Example("step_meta[prefill]", kernel._step_meta, _prefill),
    Example("draft_meta[gamma 5]", kernel._draft_meta, _draft),
]
