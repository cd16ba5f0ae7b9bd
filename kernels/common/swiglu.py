"""SwiGLU with a clamp, between the two products of an expert."""

import torch.nn.functional as F
from torch import Tensor


def swiglu_values(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), in the dtype of both."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
