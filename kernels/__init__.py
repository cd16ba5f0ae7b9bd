"""Triton kernels with a torch reference each.

A row must not depend on its batch, so one sum must be computed in one way wherever the row lies in
a tile and whatever the tile's height. Two things in Triton would break that, and both are switched
off here for every kernel this process compiles:

- Contraction: of a * b + c * d either product may be fused into the addition, and the compiler
  chooses differently in the copies of an unrolled loop.
- wgmma: on Hopper high tiles would take it and low ones mma.sync, which round differently. Ada has
  mma.sync only.
"""

import os

COMPILER_SETTINGS = {"TRITON_DEFAULT_FP_FUSION": "0", "DISABLE_MMA_V3": "1"}
os.environ.update(COMPILER_SETTINGS)
