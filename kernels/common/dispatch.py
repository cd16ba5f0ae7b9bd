"""Which implementation an op runs: Triton on CUDA tensors, the torch reference everywhere else."""

import functools
import os

import torch

# Triton decides when a kernel is decorated, so the process must be started with it set.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# A row must not depend on its batch, so one sum must be computed in one way wherever the row lies
# in a tile and whatever the tile's height. Two things in Triton would break that:
# - Contraction: of a * b + c * d either product may be fused into the addition, and the compiler
#   chooses differently in the copies of an unrolled loop.
# - wgmma: on Hopper high tiles would take it and low ones mma.sync, which round differently. Ada
#   has mma.sync only.
COMPILER_SETTINGS = {"TRITON_DEFAULT_FP_FUSION": "0", "DISABLE_MMA_V3": "1"}


@functools.cache
def settle_compiler() -> None:
    """Compile as COMPILER_SETTINGS say from now on, in this process.

    Not on import: SGLang imports the plugin for every model, and others keep their Triton.
    """
    os.environ.update(COMPILER_SETTINGS)


def use_triton(x: torch.Tensor) -> bool:
    """True when the Triton kernel should handle `x`: on CUDA, or anywhere under the interpreter.

    `DSPARK_KERNELS=reference` forces the reference on any device, which is how a kernel is
    suspected or cleared when an output looks wrong.
    """
    triton = (x.is_cuda or INTERPRETED) and os.environ.get("DSPARK_KERNELS") != "reference"
    if triton:
        settle_compiler()  # before the launch that would compile
    return triton
