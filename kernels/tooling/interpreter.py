"""Repairs of the Triton 3.6.0 interpreter, for tests that run kernels on a CPU.

The interpreter keeps bf16 and fp8 values as raw uint16/uint8 numpy arrays and then forgets it:
`tl.dot` and arithmetic multiply bit patterns, fp32 -> bf16 truncates, fp32 -> e4m3 misrounds and
an e4m3 NaN decodes as a number. Here every such operation goes through torch, which rounds to
nearest even as the hardware does. Installed only under TRITON_INTERPRET=1.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

# Triton types whose numpy array holds bit patterns, with the torch type that gives them meaning.
NARROW = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}


def install() -> None:
    """Patch the interpreter's builder in this process. Calling it again does nothing.

    Raises:
        RuntimeError: when the process was not started with TRITON_INTERPRET=1.
    """
    from dspark.kernels.common.dispatch import INTERPRETED

    if not INTERPRETED:
        raise RuntimeError("set TRITON_INTERPRET=1 before Python starts: kernels read it on import")
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "repaired", False):
        return
    builder.repaired = True
    builder.cast_impl = _repair_cast(builder.cast_impl)
    builder.create_fp_to_fp = _repair_fp_to_fp(builder.create_fp_to_fp)
    builder.binary_op = _repair_elementwise(builder.binary_op)
    builder.ternary_op = _repair_elementwise(builder.ternary_op)
    builder.unary_op = _repair_elementwise(builder.unary_op)
    builder.create_dot = _dot
    builder.create_fma = _fma
    # maxnum/minnum return the other operand for a NaN, as the hardware instruction does.
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)


def decode(bits: np.ndarray, dtype: Any) -> np.ndarray:
    """Bit patterns of a narrow Triton type -> fp32 values (exact)."""
    narrow = torch.from_numpy(np.array(bits, order="C")).view(NARROW[dtype])
    return narrow.float().numpy()


def encode(values: np.ndarray, dtype: Any) -> np.ndarray:
    """fp32 values -> bit patterns of a narrow Triton type; nearest even, fp8 saturating."""
    wide = torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
    target = NARROW[dtype]
    if target.itemsize == 1:
        limit = torch.finfo(target).max
        wide = wide.clamp(-limit, limit)  # keeps NaN
    bits = torch.uint16 if target.itemsize == 2 else torch.uint8
    return wide.to(target).view(bits).numpy()


def _values(handle: Any) -> np.ndarray:
    scalar = handle.dtype.scalar
    return decode(handle.data, scalar) if scalar in NARROW else handle.data


def _handle(values: np.ndarray, dtype: Any) -> Any:
    """Handle of type `dtype`; a comparison keeps its bools, as the unpatched builder does."""
    scalar = dtype.scalar
    if scalar in NARROW and values.dtype != np.bool_:
        values = encode(values, scalar)
    return interpreter.TensorHandle(values, scalar)


def _repair_cast(original: Callable) -> Callable:
    @functools.wraps(original)
    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        target = dst_type.scalar
        if src.dtype.scalar not in NARROW and target not in NARROW:
            return original(self, src, dst_type)
        values = _values(src)
        if target in NARROW:
            return _handle(values.astype(np.float32), target)
        return _handle(values.astype(interpreter._get_np_dtype(target)), target)

    return cast_impl


def _repair_fp_to_fp(original: Callable) -> Callable:
    nearest = interpreter._ir.ROUNDING_MODE.RTNE

    @functools.wraps(original)
    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if rounding_mode not in (None, nearest):
            return original(self, src, dst_type, rounding_mode)
        return self.cast_impl(src, dst_type)

    return create_fp_to_fp


def _repair_elementwise(original: Callable) -> Callable:
    """Compute narrow operands in fp32 and round the result once."""

    @functools.wraps(original)
    def elementwise(self: Any, *arguments: Any) -> Any:
        *operands, op = arguments
        result_type = operands[-1].dtype.scalar
        if op is np.where or result_type not in NARROW:
            return original(self, *arguments)
        return _handle(op(*map(_values, operands)), result_type)

    return elementwise


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_imprecise: Any) -> Any:
    # Summed in fp64: the order in which a BLAS adds fp32 products depends on the tile's height.
    product = np.matmul(_values(a), _values(b), dtype=np.float64)
    return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    """fp32 products are exact in fp64, so only the final sum rounds (twice, in rare ties)."""
    if z.dtype.scalar == tl.float64:
        return interpreter.TensorHandle(x.data * y.data + z.data, tl.float64)
    wide = [_values(v).astype(np.float64) for v in (x, y, z)]
    return _handle((wide[0] * wide[1] + wide[2]).astype(np.float32), z.dtype)
