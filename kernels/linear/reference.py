"""Torch linear algebra: fp64 accumulation and one rounding, so a row never feels its batch.

Products of two bf16 or fp8 numbers are exact in fp64 and their sums nearly always are, which is
what makes one row alone, inside six and inside forty-eight come out with the same bits.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from dspark.kernels.common.fp8 import AMAX_FLOOR, FP8_MAX
from dspark.kernels.common.row_chunks import over_rows
from dspark.kernels.common.swiglu import swiglu_values
from dspark.kernels.linear.types import Bf16Weight, Fp8Weight

FP8 = torch.float8_e4m3fn
GROUP = 128  # columns per activation scale; weight blocks are GROUP x GROUP


def dequantise_fp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """e4m3 [N, K] times its block scales f32 [ceil(N/128), ceil(K/128)] -> f64 [N, K]."""
    n, k = codes.shape
    by_row = scales.double().repeat_interleave(GROUP, 0)[:n]
    return codes.double() * by_row.repeat_interleave(GROUP, 1)[:, :k]


def ceil_pow2(x: torch.Tensor) -> torch.Tensor:
    """Smallest power of two >= x for positive normal f32, from the bits (log2 misrounds)."""
    return ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def act_quant(
    x: torch.Tensor, group: int = GROUP, pow2: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations per row and column group.

    x: bf16 or f32 [T, K]. Returns codes e4m3 [T, K] and scales f32 [T, ceil(K/group)] with
    scale = max(amax, 1e-4)/448, rounded up to a power of two when `pow2` (checkpoints with
    `scale_fmt: ue8m0`); x is close to codes * scale.
    """
    rows, k = x.shape
    groups = -(-k // group)
    values = x.float()
    if k % group:
        values = F.pad(values, (0, groups * group - k))
    values = values.view(rows, groups, group)
    scale = values.abs().amax(-1).clamp_(min=AMAX_FLOOR).div_(FP8_MAX)
    if pow2:
        scale = ceil_pow2(scale)
    codes = (values / scale.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    codes = codes.view(rows, groups * group)
    return (codes[:, :k].contiguous() if k % group else codes), scale


def quantised_activation(x: torch.Tensor) -> torch.Tensor:
    """[T, K] -> the f64 values an FP8 linear sees; f32 input (oracle mode) passes unrounded."""
    if x.dtype == torch.float32:
        return x.double()
    codes, scale = act_quant(x)
    rows, k = x.shape
    if k % GROUP:
        return codes.double() * scale.repeat_interleave(GROUP, 1)[:, :k]
    return (codes.double().view(rows, k // GROUP, GROUP) * scale.unsqueeze(-1)).view(rows, k)


def fp8_linear(x: torch.Tensor, w: Fp8Weight, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """y = x @ w.T with activations quantised per 128 columns.

    x: bf16 [T, K] (f32: oracle, unquantised). Returns [T, N] in `out_dtype`, by default x's
    dtype. Raises ValueError when K differs.
    """
    dtype = out_dtype or x.dtype
    dense = dequantise_fp8(w.codes, w.scales) if w.dense is None else w.dense
    return over_rows(lambda rows: torch.mm(quantised_activation(rows), dense.t()).to(dtype), x)


def bf16_linear(
    x: torch.Tensor, w: Bf16Weight, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """y = x @ w.T without quantisation.

    x: bf16 or f32 [T, K]. Returns [T, N] in `out_dtype`, by default x's dtype. Raises ValueError
    when K differs.
    """
    dtype = out_dtype or x.dtype
    dense = w.weight.double() if w.dense is None else w.dense
    return over_rows(lambda rows: torch.mm(rows.double(), dense.t()).to(dtype), x)


def fp8_linear_parts(
    x: torch.Tensor, w: Fp8Weight, parts: Sequence[int], out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    """`fp8_linear` with two or three matrices stacked in w, in one launch.

    parts: outputs of each matrix; all but the last are multiples of 128, so that no block of
    weight scales and no program spans two. Returns one [T, part] each, contiguous on a GPU.
    Raises ValueError when K differs or `parts` do not fit N.
    """
    return fp8_linear(x, w, out_dtype).split(parts, 1)


def bf16_linear_parts(
    x: torch.Tensor, w: Bf16Weight, parts: Sequence[int], out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    """`bf16_linear` with two or three matrices stacked in w, as `fp8_linear_parts`."""
    return bf16_linear(x, w, out_dtype).split(parts, 1)


def grouped_linear(o: torch.Tensor, w: Fp8Weight | Bf16Weight) -> torch.Tensor:
    """Group g of the attention output times its own rows of `wo_a`.

    o: bf16 or f32 [T, G, K]; w: [G*Ro, K]. FP8 storage is dequantised and the activation stays
    unquantised, as the model defines it. Returns [T, G*Ro] in o's dtype. Raises ValueError when K
    differs or G does not divide the weight rows.
    """
    groups, k = o.shape[1], o.shape[2]
    if w.dense is not None:
        dense = w.dense
    else:
        dense = dequantise_fp8(*w[:2]) if isinstance(w, Fp8Weight) else w.weight.double()
    by_group = dense.view(groups, -1, k).transpose(1, 2)

    def project(rows):  # [t, G, K] -> [t, G*Ro]
        y = torch.bmm(rows.double().transpose(0, 1), by_group)
        return y.transpose(0, 1).flatten(1).to(rows.dtype)

    return over_rows(project, o)


def swiglu(gate_up: torch.Tensor, limit: float, *, out_dtype: torch.dtype) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit).

    gate_up: f32 [T, 2I], gate first, contiguous. Returns [T, I] in `out_dtype`: the activation
    dtype of the model, because a following FP8 linear takes f32 to mean the unquantised oracle.
    """
    gate, up = gate_up.double().chunk(2, dim=-1)
    return swiglu_values(gate, up, limit).to(out_dtype)


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
    return fp8_linear(swiglu(gate_up, limit, out_dtype=act_dtype), w, out_dtype)


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * w over the last axis, rounded once to x's dtype.

    x: bf16 or f32 [..., N]; w: [N]. Raises ValueError when N differs.
    """
    weight = w.double()
    return over_rows(lambda rows: F.rms_norm(rows.double(), w.shape, weight, eps).to(x.dtype), x)
