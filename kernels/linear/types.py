"""Prepared weights of the linear ops."""

from typing import NamedTuple

import torch


class Fp8Weight(NamedTuple):
    """FP8 matrix with one scale per 128x128 block; `dense` is the fp64 product, kept on CPU."""

    codes: torch.Tensor  # e4m3 [N, K]
    scales: torch.Tensor  # f32 [ceil(N/128), ceil(K/128)]
    dense: torch.Tensor | None  # f64 [N, K]


class Bf16Weight(NamedTuple):
    """Unquantised matrix; `dense` is its fp64 copy, kept on CPU."""

    weight: torch.Tensor  # bf16 or f32 [N, K]
    dense: torch.Tensor | None  # f64 [N, K]
