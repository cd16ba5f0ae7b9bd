"""K01-K04, K09: activation quantiser, FP8 and BF16 linears, grouped projection, RMSNorm.

A bf16 activation runs the served arithmetic. An f32 activation runs the oracle: no activation
quantiser and no bf16 rounding (CPU only, used to compare against full-precision models).
"""

from collections.abc import Callable, Sequence

import torch

from dspark.kernels.common.arrivals import arrival_counters
from dspark.kernels.common.dispatch import use_triton
from dspark.kernels.linear import kernel, reference
from dspark.kernels.linear.reference import GROUP, decode_e8m0, dequantise_fp8
from dspark.kernels.linear.types import Bf16Weight, Fp8Weight

__all__ = [
    "Bf16Weight",
    "Fp8Weight",
    "act_quant",
    "bf16_linear",
    "bf16_linear_parts",
    "decode_e8m0",
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


def prepare_fp8(codes: torch.Tensor, scales: torch.Tensor) -> Fp8Weight:
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


def prepare_bf16(weight: torch.Tensor) -> Bf16Weight:
    """Pack an unquantised matrix, bf16 (served) or f32 (oracle) [N, K]; ValueError otherwise."""
    if weight.ndim != 2 or weight.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"A linear weight must be a bf16 or f32 matrix, got {weight.dtype} "
            f"{tuple(weight.shape)}."
        )
    weight = weight.contiguous()
    return Bf16Weight(weight, _dense(weight, weight.double))


def act_quant(
    x: torch.Tensor, group: int = GROUP, pow2: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """K01: quantise activations per row and column group.

    x: bf16 or f32 [T, K]. Returns codes e4m3 [T, K] and scales f32 [T, ceil(K/group)] with
    scale = max(amax, 1e-4)/448, rounded up to a power of two when `pow2` (checkpoints with
    `scale_fmt: ue8m0`); x is close to codes * scale.
    """
    return (kernel if use_triton(x) else reference).act_quant(x, group, pow2)


def fp8_linear(x: torch.Tensor, w: Fp8Weight, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """K02: y = x @ w.T with activations quantised per 128 columns.

    x: bf16 [T, K] (f32: oracle, unquantised). Returns [T, N] in `out_dtype`, by default x's
    dtype. Raises ValueError when K differs.
    """
    _same_width(x.shape[-1], w.codes.shape[1])
    return _ops(x).fp8_linear(x, w, out_dtype)


def swiglu(gate_up: torch.Tensor, limit: float, *, out_dtype: torch.dtype) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit).

    gate_up: f32 [T, 2I], gate first, contiguous. Returns [T, I] in `out_dtype`: the activation
    dtype of the model, because a following FP8 linear takes f32 to mean the unquantised oracle.
    """
    return (kernel if use_triton(gate_up) else reference).swiglu(gate_up, limit, out_dtype)


def swiglu_linear(
    gate_up: torch.Tensor,
    w: Fp8Weight,
    limit: float,
    *,
    act_dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """fp8_linear(swiglu(gate_up, limit, out_dtype=act_dtype), w, out_dtype) in one launch.

    gate_up: f32 [T, 2K], gate first, contiguous; w: [N, K]. Returns [T, N] in `out_dtype`, by
    default `act_dtype`. Raises ValueError when K differs.
    """
    _same_width(gate_up.shape[-1], 2 * w.codes.shape[1])
    served = use_triton(gate_up) and act_dtype == torch.bfloat16
    return (kernel if served else reference).swiglu_linear(gate_up, w, limit, act_dtype, out_dtype)


def bf16_linear(
    x: torch.Tensor, w: Bf16Weight, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """K03: y = x @ w.T without quantisation.

    x: bf16 or f32 [T, K]. Returns [T, N] in `out_dtype`, by default x's dtype. Raises ValueError
    when K differs.
    """
    _same_width(x.shape[-1], w.weight.shape[1])
    return _ops(x).bf16_linear(x, w, out_dtype)


def fp8_linear_parts(
    x: torch.Tensor, w: Fp8Weight, parts: Sequence[int], out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    """`fp8_linear` with two or three matrices stacked in w, in one launch.

    parts: outputs of each matrix; all but the last are multiples of 128, so that no block of
    weight scales and no program spans two. Returns one [T, part] each, contiguous on a GPU.
    Raises ValueError when K differs or `parts` do not fit N.
    """
    _same_width(x.shape[-1], w.codes.shape[1])
    _check_parts(parts, w.codes.shape[0])
    return _ops(x).fp8_linear_parts(x, w, parts, out_dtype)


def bf16_linear_parts(
    x: torch.Tensor, w: Bf16Weight, parts: Sequence[int], out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    """`bf16_linear` with two or three matrices stacked in w, as `fp8_linear_parts`."""
    _same_width(x.shape[-1], w.weight.shape[1])
    _check_parts(parts, w.weight.shape[0])
    return _ops(x).bf16_linear_parts(x, w, parts, out_dtype)


def grouped_linear(o: torch.Tensor, w: Fp8Weight | Bf16Weight) -> torch.Tensor:
    """K04: group g of the attention output times its own rows of `wo_a`.

    o: bf16 or f32 [T, G, K]; w: [G*Ro, K]. FP8 storage is dequantised and the activation stays
    unquantised, as the model defines it. Returns [T, G*Ro] in o's dtype. Raises ValueError when K
    differs or G does not divide the weight rows.
    """
    rows, width = w[0].shape
    _same_width(o.shape[-1], width)
    if rows % o.shape[1]:
        raise ValueError(f"{rows} weight rows cannot be split into {o.shape[1]} groups.")
    return _ops(o).grouped_linear(o, w)


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """K09: x / sqrt(mean(x^2) + eps) * w over the last axis, rounded once to x's dtype.

    x: bf16 or f32 [..., N]; w: [N]. Raises ValueError when N differs.
    """
    _same_width(x.shape[-1], w.shape[0])
    return _ops(x).rms_norm(x, w, eps)


def _dense(weight: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """The fp64 matrix on the CPU. A GPU needs none, but its counters before any graph capture."""
    if not weight.is_cuda:
        return make()
    arrival_counters(weight.device)
    return None


def _ops(x: torch.Tensor):
    """The implementation for x; the oracle's f32 activations always take the reference."""
    return kernel if use_triton(x) and x.dtype == torch.bfloat16 else reference


def _check_parts(parts: Sequence[int], outputs: int) -> None:
    if len(parts) not in (2, 3) or sum(parts) != outputs:
        raise ValueError(f"{parts} are not two or three parts of {outputs} weight rows.")
    if any(part % GROUP for part in parts[:-1]):
        raise ValueError(f"Stacked matrices need whole blocks of {GROUP} rows, got {parts}.")


def _same_width(activation: int, weight: int) -> None:
    if activation != weight:
        raise ValueError(f"Activation has {activation} columns, the weight {weight}.")
