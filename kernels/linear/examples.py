"""The matrices of one rank of the 4096-wide model, in both decode tiles and in prefill."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dspark.kernels.linear import kernel
from dspark.kernels.linear.types import Bf16Weight, Fp8Weight
from dspark.kernels.tooling.entries import Example, meta

ROWS = {"few": 3, "many": 19, "prefill": 67}


class Matrix(NamedTuple):
    kind: str  # weights and activations of 8 or 16 bits
    outputs: Sequence[int]  # of each matrix that is stacked
    k: int
    out: torch.dtype


def _run(matrix: Matrix, rows: int) -> None:
    kind, outputs, k, out = matrix
    n = sum(outputs)
    x = meta(torch.bfloat16, rows, k)
    if kind == "swiglu":
        gate_up = meta(torch.float32, rows, 2 * k)
        kernel.swiglu_linear(gate_up, _fp8(n, k), 7.0, act_dtype=x.dtype, out_dtype=out)
    elif kind == "w8a16":
        kernel.grouped_linear(x[:, None], _fp8(n, k))
    elif len(outputs) > 1 and kind == "w8a8":
        kernel.fp8_linear_parts(x, _fp8(n, k), outputs, out)
    elif len(outputs) > 1:
        kernel.bf16_linear_parts(x, _bf16(n, k), outputs, out)
    elif kind == "w8a8":
        kernel.fp8_linear(x, _fp8(n, k), out)
    else:
        kernel.bf16_linear(x, _bf16(n, k), out)


def _fp8(n: int, k: int) -> Fp8Weight:
    scales = meta(torch.float32, -(-n // 128), -(-k // 128))
    return Fp8Weight(meta(torch.float8_e4m3fn, n, k), scales, None)


def _bf16(n: int, k: int) -> Bf16Weight:
    return Bf16Weight(meta(torch.bfloat16, n, k), None)


def _example(matrix: Matrix, regime: str) -> Example:
    shape = f"{'+'.join(map(str, matrix.outputs))}x{matrix.k}"
    return Example(
        f"linear[{matrix.kind} {shape}, {regime}]",
        kernel._linear,
        lambda: _run(matrix, ROWS[regime]),
        mma=True,
        # Prefill spills a little where K has four parts: 8 warps would not, but spill elsewhere.
        hot=regime != "prefill",
    )


MATRICES = [
    Matrix("w8a8", (512,), 4096, torch.bfloat16),
    Matrix("w8a8", (4096,), 1024, torch.bfloat16),
    Matrix("w8a8", (4096,), 256, torch.float32),
    Matrix("w8a16", (1024,), 4096, torch.bfloat16),
    Matrix("bf16", (256,), 4096, torch.float32),
    Matrix("bf16", (16160,), 4096, torch.float32),
    Matrix("w8a8", (1024, 512), 4096, torch.bfloat16),
    Matrix("w8a8", (4096, 8192), 1024, torch.bfloat16),
    Matrix("bf16", (2048, 512, 64), 4096, torch.float32),
]
SWIGLU = Matrix("swiglu", (4096,), 256, torch.float32)


def _activation() -> torch.Tensor:
    return meta(torch.bfloat16, 3, 4096)


def _swiglu() -> None:
    kernel.swiglu(meta(torch.float32, 3, 512), 7.0, out_dtype=torch.bfloat16)


EXAMPLES = [
    *(_example(matrix, regime) for matrix in MATRICES for regime in ROWS),
    _example(SWIGLU, "few"),
    Example("swiglu", kernel._swiglu, _swiglu),
    Example("act_quant", kernel._act_quant, lambda: kernel.act_quant(_activation())),
    Example(
        "rms_norm",
        kernel._rms_norm,
        lambda: kernel.rms_norm(_activation(), meta(torch.bfloat16, 4096), 1e-6),
    ),
]
