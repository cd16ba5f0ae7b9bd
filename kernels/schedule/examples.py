"""Budgets of blocks of five drafts."""

import torch

from dspark.kernels.schedule import kernel
from dspark.kernels.tooling.entries import Example, meta

R, GAMMA = 3, 5


def _schedule(num_real: torch.Tensor | None = None) -> None:
    # Two rows at least, because Triton would make a 1 part of the binary; five drafts to choose.
    kernel.schedule(
        meta(torch.float32, R, GAMMA + 1), meta(torch.int32, 1), min_len=2, num_real=num_real
    )


def _padded() -> None:
    _schedule(meta(torch.int32, 1))


EXAMPLES = [
    Example("schedule[gamma 5]", kernel._schedule, _schedule),
    Example("schedule[gamma 5, padded]", kernel._schedule, _padded),
]
