"""Rounding to the served number formats with straight-through gradients.

Weights round exactly as the exporter will encode them; activations and KV as the kernels do.
"""

from typing import Any

import torch
import torch.nn.functional as F

FP8_MAX = 448.0
E2M1_MAX = 6.0
FP8_BLOCK = 128
MXFP4_GROUP = 32
KV_GROUP = 64
AMAX_FLOOR = 1e-4
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def fp8_weight(weight: torch.Tensor) -> torch.Tensor:
    """f32 [N, K] through e4m3 in 128x128 blocks with power-of-two scales."""
    rows, columns = weight.shape
    with torch.no_grad():
        padded = F.pad(weight, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
        blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
        scale = _smallest_scale(blocks.abs().amax((1, 3), keepdim=True), FP8_MAX)
        rounded = (blocks / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale
        rounded = rounded.flatten(2).flatten(0, 1)[:rows, :columns].contiguous()
    return _StraightThrough.apply(weight, rounded)


def mxfp4_weight(weight: torch.Tensor) -> torch.Tensor:
    """f32 [..., K] through E2M1 in groups of 32 columns with power-of-two scales."""
    with torch.no_grad():
        groups = weight.unflatten(-1, (-1, MXFP4_GROUP))
        scale = _smallest_scale(groups.abs().amax(-1, keepdim=True), E2M1_MAX)
        rounded = (_round_e2m1(groups / scale) * scale).flatten(-2)
    return _StraightThrough.apply(weight, rounded)


def bf16_weight(weight: torch.Tensor) -> torch.Tensor:
    """f32 [...] through bf16."""
    with torch.no_grad():
        rounded = weight.to(torch.bfloat16).to(weight.dtype)
    return _StraightThrough.apply(weight, rounded)


def fp8_rows(x: torch.Tensor, group: int) -> torch.Tensor:
    """[..., K] through e4m3 in groups of columns (a shorter tail is a group of its own).

    One power-of-two scale a group, at least 1e-4 / 448: the rule for activations (group 128)
    and for the part of keys and values without RoPE (group 64).
    """
    padded = F.pad(x.detach().float(), (0, -x.shape[-1] % group))
    groups = padded.unflatten(-1, (-1, group))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=AMAX_FLOOR)
    scale = torch.exp2(torch.ceil(torch.log2(amax / FP8_MAX)))
    scaled = (groups / scale).clamp(-FP8_MAX, FP8_MAX)
    rounded = scaled.to(torch.float8_e4m3fn).float() * scale
    rounded = rounded.flatten(-2)[..., : x.shape[-1]].to(x.dtype)
    return x + (rounded - x).detach()


def _smallest_scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """2^e with amax <= largest * 2^e; 1 for zeros. Exact: no logarithm is rounded."""
    mantissa, exponent = torch.frexp(amax / largest)  # mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = torch.where(amax == 0, torch.zeros_like(exponent), exponent)
    return torch.ldexp(torch.ones_like(amax), exponent)


def _round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 value, ties to the code with an even mantissa bit."""
    values = torch.tensor(_E2M1, device=x.device, dtype=x.dtype)
    midpoints = (values[1:] + values[:-1]) / 2
    magnitude = x.abs()
    code = torch.bucketize(magnitude, midpoints)  # number of midpoints below
    tie_up = (magnitude[..., None] == midpoints[1::2]).any(-1)  # 0.75, 1.75, 3.5
    return values[code + tie_up] * x.sign()
