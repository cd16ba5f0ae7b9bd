"""Addresses of a target step in its three forms, and of blocks of five drafts."""

import torch

from dspark.kernels.step import kernel
from dspark.kernels.tooling.entries import Example, meta

R, ROWS, SLOTS, TOKENS = 3, 18, 9, 4097


def _step(stride: int | None, store_all: bool) -> None:
    kernel.step_meta(
        **_batch(),
        row_len=meta(torch.int64, R),
        rows=ROWS,
        ring_c4=17,
        ring_c128=137,
        max_pages=17,
        max_c128=33,
        page=257,
        store_all=store_all,
        stride=stride,
    )


def _batch() -> dict:
    """Odd sizes throughout: none is part of the binary."""
    return {
        "request_slot": meta(torch.int64, R),
        "committed": meta(torch.int64, R),
        "req_to_token": meta(torch.int32, SLOTS, TOKENS),
        "full_to_swa": meta(torch.int64, TOKENS),
        "window": 127,
    }


def _verify() -> None:
    _step(stride=ROWS // R, store_all=True)


def _decode() -> None:
    _step(stride=None, store_all=True)


def _prefill() -> None:
    _step(stride=None, store_all=False)


def _draft() -> None:
    kernel.draft_meta(**_batch(), gamma=5, valid_from=meta(torch.int64, R))


EXAMPLES = [
    Example("step_meta[verify]", kernel._step_meta, _verify),
    Example("step_meta[decode]", kernel._step_meta, _decode),
    Example("step_meta[prefill]", kernel._step_meta, _prefill),
    Example("draft_meta[gamma 5]", kernel._draft_meta, _draft),
]
