"""Which implementation an op runs: Triton on CUDA tensors, the torch reference everywhere else."""

import os

import torch

# Triton decides when a kernel is decorated, so the process must be started with it set.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(x: torch.Tensor) -> bool:
    """True when the Triton kernel should handle `x`: on CUDA, or anywhere under the interpreter.

    `DSPARK_KERNELS=reference` forces the reference on any device, which is how a kernel is
    suspected or cleared when an output looks wrong.
    """
    return (x.is_cuda or INTERPRETED) and os.environ.get("DSPARK_KERNELS") != "reference"
