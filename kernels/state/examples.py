"""Rings of all C4 layers and of all C128 layers of the model."""

import torch

from dspark.kernels.state import kernel
from dspark.kernels.tooling.entries import Example, meta

REQUESTS, VERIFY_WIDTH = 3, 6


def _rollback() -> None:
    kernel.c128_rollback(
        meta(torch.float32, 20, 9 * 137, 1024),
        meta(torch.int64, REQUESTS),
        meta(torch.int64, REQUESTS),
        meta(torch.int32, REQUESTS),
        meta(torch.int32, REQUESTS),
        ring=137,
        verify_width=VERIFY_WIDTH,
    )


def _clear() -> None:
    pools = [meta(torch.float32, 21, 9 * 17, width) for width in (2048, 512)]
    kernel.clear_blocks(pools, meta(torch.int64, 3), ring=17)


EXAMPLES = [
    Example("rollback", kernel._rollback, _rollback, hot=False),
    Example("clear", kernel._clear, _clear, hot=False),
]
