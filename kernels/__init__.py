"""Triton kernels with a torch reference each.

A row must not depend on its batch, so one product must be added up in one way whatever the height
of its tile. Triton on Hopper would take wgmma for high tiles and mma.sync for low ones, which
round differently; with this variable it takes Ada's mma.sync for all.
"""

import os

os.environ["DISABLE_MMA_V3"] = "1"
