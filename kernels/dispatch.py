"""Which implementation an op runs: Triton on CUDA tensors, the torch reference everywhere else."""

import os

import torch


def use_triton(x: torch.Tensor) -> bool:
    """True when the Triton kernel should handle `x`.

    `DSPARK_KERNELS=reference` forces the reference on any device, which is how a kernel is
    suspected or cleared when an output looks wrong.
    """
    return x.is_cuda and os.environ.get("DSPARK_KERNELS") != "reference"
