"""Routing and MXFP4 experts.

A bf16 activation runs the served arithmetic (bf16 input and bf16 hidden, wide accumulation). An
f32 activation runs the oracle without intermediate rounding.
"""

import torch
from torch import Tensor

from dspark.kernels.common.dispatch import op, use_triton
from dspark.kernels.moe import reference
from dspark.kernels.moe.reference import SCALE_GROUP, dequantise_mxfp4
from dspark.kernels.moe.types import ExpertWeights, Route
from dspark.kernels.moe.words import LARGEST_SCALE, streamed

__all__ = [
    "ExpertWeights",
    "Route",
    "dequantise_mxfp4",
    "moe_mxfp4",
    "prepare_experts",
    "route",
]


def prepare_experts(w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> ExpertWeights:
    """Pack the MXFP4 experts of a layer.

    w13: u8 [E, 2I, Hd/2] (`experts.*.w1` rows then `.w3` rows), s13: E8M0 u8 [E, 2I, Hd/32];
    w2: u8 [E, Hd, I/2], s2: E8M0 u8 [E, Hd, I/32]. int8 and float8_e8m0fnu views are accepted.
    Raises ValueError when the shapes disagree, when a scale byte is 255 (NaN) or above 2.0
    (such a group would hold weights up to 24; trained ones stay far below, and bf16 could not hold
    the factor that decodes them).
    """
    w13, s13, w2, s2 = (t.view(torch.uint8).contiguous() for t in (w13, s13, w2, s2))
    count, double_width, half_hidden = w13.shape
    hidden, width = 2 * half_hidden, double_width // 2
    expected = {
        "s13": (s13, (count, 2 * width, hidden // SCALE_GROUP)),
        "w2": (w2, (count, hidden, width // 2)),
        "s2": (s2, (count, hidden, width // SCALE_GROUP)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"Experts with w13 {tuple(w13.shape)} need {name} {shape}, "
                f"got {tuple(tensor.shape)}."
            )
    largest = max(int(s13.max()), int(s2.max()))
    if largest == 255:
        raise ValueError("MXFP4 scales contain byte 255, which is NaN in E8M0.")
    if largest > LARGEST_SCALE:
        raise ValueError(f"An MXFP4 scale is 2^{largest - 127}; scales above 2 are not supported.")
    if w13.is_cuda:
        served = use_triton(w13)
        return streamed(w13, s13, w2, s2) if served else ExpertWeights(w13, s13, w2, s2, None, None)
    return ExpertWeights(w13, s13, w2, s2, dequantise_mxfp4(w13, s13), dequantise_mxfp4(w2, s2))


def _choice_fits(logits: Tensor, token_ids: Tensor, k: int) -> None:
    if k > logits.shape[1] or token_ids.shape[0] != logits.shape[0]:
        raise ValueError(
            f"Cannot choose {k} experts from logits {tuple(logits.shape)} "
            f"for {token_ids.shape[0]} tokens."
        )


def _rows_fit(x: Tensor, experts: ExpertWeights, route: Route, shared: Tensor | None) -> None:
    if x.shape[1] != experts.hidden or route.experts.shape[0] != x.shape[0]:
        raise ValueError(
            f"Activation {tuple(x.shape)} fits neither experts of hidden width {experts.hidden} "
            f"nor a route of {route.experts.shape[0]} rows."
        )
    if not x.is_contiguous() or not (shared is None or shared.is_contiguous()):
        raise ValueError("Expert inputs must be contiguous.")


def _is_oracle(x: Tensor) -> bool:
    """The oracle's f32 activations always take the reference."""
    return x.dtype != torch.bfloat16


route = op(reference.route, check=_choice_fits)
moe_mxfp4 = op(reference.moe_mxfp4, check=_rows_fit, reference_if=_is_oracle)
