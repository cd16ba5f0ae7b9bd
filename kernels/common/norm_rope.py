"""RMS norm and rotary position, in fp64.

RoPE rotates interleaved pairs (2i, 2i+1) of the LAST 64 dims. `cos_sin` is f32
`[max_positions, 64]`, columns 0..31 cosines and 32..63 sines.
"""

import torch
from torch import Tensor

ROPE = 64  # dims that rotate


def rotation(cos_sin: Tensor, pos: Tensor) -> Tensor:
    """c128 [T, 32] factors cos + i sin of each row's position."""
    row = cos_sin[pos.long()].double()
    return torch.complex(row[:, : ROPE // 2], row[:, ROPE // 2 :])


def rotate(x: Tensor, factors: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i+1) of x f64 [..., 64] by c128 factors broadcastable to [..., 32]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * factors).flatten(-2)


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """f64 [..., 1] reciprocal root mean square of x f64 [..., N]."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
