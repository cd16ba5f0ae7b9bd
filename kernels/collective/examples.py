"""Sums over eight ranks of some rows of a 4096-wide model."""

import torch

from dspark.kernels.collective import host_kernel, host_layout, kernel
from dspark.kernels.tooling.entries import Example, meta

RANKS, ROWS, COLUMNS = 8, 3, 4096
LAYOUT = host_layout.Layout(RANKS, COLUMNS)


def _sum() -> None:
    kernel.ordered_sum(meta(torch.bfloat16, RANKS, ROWS, COLUMNS))


def _host(rows: int) -> None:
    host_kernel.host_sum(
        meta(torch.bfloat16, rows, COLUMNS),
        host_layout.views(meta(torch.uint8, LAYOUT.nbytes), LAYOUT),
        meta(torch.int64, host_layout.CHANNELS),
        meta(torch.int64, 2),
        rank=3,
    )


def _one_row() -> None:
    _host(1)


def _some_rows() -> None:
    _host(ROWS)


EXAMPLES = [
    Example("ordered_sum[8 ranks]", kernel._ordered_sum, _sum),
    Example("host_one_shot[8 ranks]", host_kernel.one_shot, _one_row),
    Example("host_two_shot[8 ranks]", host_kernel.two_shot, _some_rows),
]
