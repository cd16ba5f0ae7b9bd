"""Matrix products and norms in training precision."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from dspark.bench.train_embedded.quantise import fp8_rows

ACTIVATION_GROUP = 128


class Numerics(NamedTuple):
    dtype: torch.dtype  # of streams and matrix products
    rounding: bool  # FP8 round trips of activations and KV, as served


EXACT = Numerics(torch.float32, rounding=False)


def linear_fp8(x: torch.Tensor, weight: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """[..., K] x [N, K] with the activation quantiser of the FP8 matrices."""
    if numerics.rounding:
        x = fp8_rows(x, ACTIVATION_GROUP)
    return F.linear(x, weight)


def linear_f32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[..., K] x [N, K] to f32, of bf16 or f32 inputs."""
    return F.linear(x.float(), weight.float())


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Over the last axis, in f32; back to the dtype of x."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight
    return normed.to(x.dtype)
