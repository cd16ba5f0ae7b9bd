"""The sum over eight ranks of some rows of a 4096-wide model."""

import torch

from dspark.kernels.collective import kernel
from dspark.kernels.tooling.entries import Example, meta


def _sum() -> None:
    kernel.ordered_sum(meta(torch.bfloat16, 8, 3, 4096))


EXAMPLES = [Example("ordered_sum[8 ranks]", kernel._ordered_sum, _sum)]
