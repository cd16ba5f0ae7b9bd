"""Activation quantiser, FP8 and BF16 linears, grouped projection, SwiGLU and RMS norm.

A bf16 activation runs the served arithmetic. An f32 activation runs the oracle: no activation
quantiser and no bf16 rounding (used to compare against full-precision models).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dspark.kernels.common.arrivals import arrival_counters
from dspark.kernels.common.dispatch import op
from dspark.kernels.common.fp8 import decode_e8m0
from dspark.kernels.linear import reference
from dspark.kernels.linear.reference import GROUP, dequantise_fp8
from dspark.kernels.linear.types import Bf16Weight, Fp8Weight

__all__ = [
    "Bf16Weight",
    "Fp8Weight",
    "act_quant",
    "bf16_linear",
    "bf16_linear_parts",
    "dequantise_fp8",
    "fp8_linear",
    "fp8_linear_parts",
    "grouped_linear",
    "prepare_bf16",
    "prepare_fp8",
    "rms_norm",
    "swiglu",
    "swiglu_linear",
]


def prepare_fp8(codes: Tensor, scales: Tensor) -> Fp8Weight:
    """Pack a checkpoint FP8 matrix for serving.

    codes: e4m3 [N, K] (`*.weight`). scales: [ceil(N/128), ceil(K/128)] as E8M0 bytes (uint8 or
    float8_e8m0fnu, `*.scale`) or already f32. Raises ValueError for another dtype or shape and
    for a scale that is not finite (E8M0 byte 255).
    """
    if codes.dtype != reference.FP8 or codes.ndim != 2:
        raise ValueError(f"FP8 weight must be a float8_e4m3fn matrix, got {codes.dtype}.")
    expected = tuple(-(-size // GROUP) for size in codes.shape)
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"FP8 weight {tuple(codes.shape)} needs scales {expected}, got {tuple(scales.shape)}."
        )
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scales = decode_e8m0(scales)
    elif scales.dtype != torch.float32:
        raise ValueError(f"FP8 scales must be E8M0 bytes or float32, got {scales.dtype}.")
    if not torch.isfinite(scales).all():
        raise ValueError("FP8 scales contain a value that is not finite (E8M0 byte 255).")
    codes, scales = codes.contiguous(), scales.contiguous()
    return Fp8Weight(codes, scales, _dense(codes, lambda: dequantise_fp8(codes, scales)))


def prepare_bf16(weight: Tensor) -> Bf16Weight:
    """Pack an unquantised matrix, bf16 (served) or f32 (oracle) [N, K]; ValueError otherwise."""
    if weight.ndim != 2 or weight.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"A linear weight must be a bf16 or f32 matrix, got {weight.dtype} "
            f"{tuple(weight.shape)}."
        )
    weight = weight.contiguous()
    return Bf16Weight(weight, _dense(weight, weight.double))


def _dense(weight: Tensor, make: Callable[[], Tensor]) -> Tensor | None:
    """The fp64 matrix on the CPU. A GPU needs none, but its counters before any graph capture."""
    if not weight.is_cuda:
        return make()
    arrival_counters(weight.device)
    return None


def _is_oracle(x: Tensor) -> bool:
    """The oracle's f32 activations always take the reference."""
    return x.dtype != torch.bfloat16


def _fp8_fits(x: Tensor, w: Fp8Weight) -> None:
    _same_width(x.shape[-1], w.codes.shape[1])


def _bf16_fits(x: Tensor, w: Bf16Weight) -> None:
    _same_width(x.shape[-1], w.weight.shape[1])


def _fp8_parts_fit(x: Tensor, w: Fp8Weight, parts: Sequence[int]) -> None:
    _fp8_fits(x, w)
    _parts_fit(parts, w.codes.shape[0])


def _bf16_parts_fit(x: Tensor, w: Bf16Weight, parts: Sequence[int]) -> None:
    _bf16_fits(x, w)
    _parts_fit(parts, w.weight.shape[0])


def _swiglu_fits(gate_up: Tensor, w: Fp8Weight) -> None:
    _same_width(gate_up.shape[-1], 2 * w.codes.shape[1])


def _groups_fit(o: Tensor, w: Fp8Weight | Bf16Weight) -> None:
    rows, width = w[0].shape
    _same_width(o.shape[-1], width)
    if rows % o.shape[1]:
        raise ValueError(f"{rows} weight rows cannot be split into {o.shape[1]} groups.")


def _norm_fits(x: Tensor, w: Tensor) -> None:
    _same_width(x.shape[-1], w.shape[0])


def _parts_fit(parts: Sequence[int], outputs: int) -> None:
    if len(parts) not in (2, 3) or sum(parts) != outputs:
        raise ValueError(f"{parts} are not two or three parts of {outputs} weight rows.")
    if any(part % GROUP for part in parts[:-1]):
        raise ValueError(f"Stacked matrices need whole blocks of {GROUP} rows, got {parts}.")


def _same_width(activation: int, weight: int) -> None:
    if activation != weight:
        raise ValueError(f"Activation has {activation} columns, the weight {weight}.")


act_quant = op(reference.act_quant)
fp8_linear = op(reference.fp8_linear, check=_fp8_fits, reference_if=_is_oracle)
fp8_linear_parts = op(reference.fp8_linear_parts, check=_fp8_parts_fit, reference_if=_is_oracle)
bf16_linear = op(reference.bf16_linear, check=_bf16_fits, reference_if=_is_oracle)
bf16_linear_parts = op(reference.bf16_linear_parts, check=_bf16_parts_fit, reference_if=_is_oracle)
grouped_linear = op(
    reference.grouped_linear, check=_groups_fit, reference_if=lambda o: _is_oracle(o)
)
swiglu = op(reference.swiglu)
swiglu_linear = op(
    reference.swiglu_linear,
    check=_swiglu_fits,
    reference_if=lambda act_dtype: act_dtype != torch.bfloat16,
)
rms_norm = op(reference.rms_norm, check=_norm_fits, reference_if=_is_oracle)
