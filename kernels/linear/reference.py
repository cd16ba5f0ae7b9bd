"""Torch linear algebra: fp64 accumulation and one rounding, so a row never feels its batch.

Products of two bf16 or fp8 numbers are exact in fp64 and their sums nearly always are, which is
what makes one row alone, inside six and inside forty-eight come out with the same bits.
"""

import torch
import torch.nn.functional as F

from dspark.kernels.linear.types import Fp8Weight

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
GROUP = 128  # columns per activation scale; weight blocks are GROUP x GROUP
AMAX_FLOOR = 1e-4
ROW_CHUNK = 512  # rows per fp64 temporary in prefill


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes to f32 powers of two; byte 0 is 0.0, byte 255 is inf (refused when loading)."""
    return (codes.view(torch.uint8).to(torch.int32) << 23).view(torch.float32)


def dequantise_fp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """e4m3 [N, K] times its block scales f32 [ceil(N/128), ceil(K/128)] -> f64 [N, K]."""
    n, k = codes.shape
    by_row = scales.double().repeat_interleave(GROUP, 0)[:n]
    return codes.double() * by_row.repeat_interleave(GROUP, 1)[:, :k]


def ceil_pow2(x: torch.Tensor) -> torch.Tensor:
    """Smallest power of two >= x for positive normal f32, from the bits (log2 misrounds)."""
    return ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def act_quant(x, group=GROUP, pow2=True):
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


def fp8_linear(x, w, out_dtype=None):
    dtype = out_dtype or x.dtype
    dense = dequantise_fp8(w.codes, w.scales) if w.dense is None else w.dense
    return over_rows(lambda rows: torch.mm(quantised_activation(rows), dense.t()).to(dtype), x)


def bf16_linear(x, w, out_dtype=None):
    dtype = out_dtype or x.dtype
    dense = w.weight.double() if w.dense is None else w.dense
    return over_rows(lambda rows: torch.mm(rows.double(), dense.t()).to(dtype), x)


def fp8_linear_parts(x, w, parts, out_dtype=None):
    return fp8_linear(x, w, out_dtype).split(parts, 1)


def bf16_linear_parts(x, w, parts, out_dtype=None):
    return bf16_linear(x, w, out_dtype).split(parts, 1)


def grouped_linear(o, w):
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


def swiglu(gate_up, limit, out_dtype):
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)).to(out_dtype)


def swiglu_linear(gate_up, w, limit, act_dtype, out_dtype):
    return fp8_linear(swiglu(gate_up, limit, act_dtype), w, out_dtype)


def rms_norm(x, w, eps):
    weight = w.double()
    return over_rows(lambda rows: F.rms_norm(rows.double(), w.shape, weight, eps).to(x.dtype), x)


def over_rows(function, x: torch.Tensor) -> torch.Tensor:
    """Apply a row-wise function in chunks, to bound its fp64 temporaries."""
    if x.shape[0] <= ROW_CHUNK:
        return function(x)
    return torch.cat([function(rows) for rows in x.split(ROW_CHUNK)])
