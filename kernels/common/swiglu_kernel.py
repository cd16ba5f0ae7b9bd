"""Triton twin of `swiglu.py`."""

import triton
import triton.language as tl


@triton.jit
def swiglu_values(gate, up, limit):
    gate = tl.minimum(gate, limit, tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, tl.PropagateNan.ALL)
    return gate / (1.0 + tl.exp(-gate)) * up
