"""The repaired interpreter computes what the hardware computes, bit for bit, checked by torch."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dspark.kernels.tooling import interpreter


@triton.jit
def _copy(src, dst, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(dst + i, tl.load(src + i).to(dst.dtype.element_ty))


@triton.jit
def _multiply_add(a, b, c, dst, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(dst + i, tl.load(a + i) * tl.load(b + i) + tl.load(c + i))


@triton.jit
def _fused(a, b, c, dst, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(dst + i, tl.fma(tl.load(a + i), tl.load(b + i), tl.load(c + i)))


@triton.jit
def _dot(a, b, dst, N: tl.constexpr):
    i = tl.arange(0, N)
    square = i[:, None] * N + i[None, :]
    tl.store(dst + square, tl.dot(tl.load(a + square), tl.load(b + square)))


@triton.jit
def _larger(a, b, dst, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(dst + i, tl.where(x > y, x, y))


@triton.jit
def _maximum(a, b, dst, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(dst + i, tl.maximum(tl.load(a + i), tl.load(b + i)))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def awkward_floats(n: int = 4096) -> torch.Tensor:
    """Random bit patterns (NaN, inf, subnormals included) and values near fp8 rounding ties."""
    generator = np.random.default_rng(0)
    patterns = torch.from_numpy(generator.integers(0, 2**32, n // 2, dtype=np.uint32))
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes.nan_to_num(448.0)
    midpoints = (codes[:-1] + codes[1:]) / 2
    near = midpoints[torch.from_numpy(generator.integers(0, 255, n // 2))]
    step = torch.from_numpy(generator.integers(-1, 2, n // 2))
    near = (bits(near) + step.int()).view(torch.float32)
    return torch.cat([patterns.view(torch.float32), near])


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return (x if dtype == torch.bfloat16 else x.clamp(-limit, limit)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_narrowing_rounds_to_nearest_even_and_saturates(dtype):
    x = awkward_floats()
    got = torch.zeros(x.shape, dtype=dtype)
    _copy[(1,)](x, got, N=x.numel())
    want = saturated(x, dtype)
    same = (bits(got) == bits(want)) | (got.float().isnan() & want.float().isnan())
    assert same.all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_fp8_code_decodes(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    got = torch.zeros(256)
    _copy[(1,)](codes, got, N=256)
    torch.testing.assert_close(got, codes.float(), rtol=0, atol=0, equal_nan=True)


def test_integers_become_bf16_values():
    got = torch.zeros(256, dtype=torch.bfloat16)
    _copy[(1,)](torch.arange(256, dtype=torch.int32), got, N=256)
    assert torch.equal(got, torch.arange(256).bfloat16())


def test_bf16_arithmetic_rounds_each_operation():
    a, b, c = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = torch.zeros_like(a)
    _multiply_add[(1,)](a, b, c, got, N=256)
    assert torch.equal(got, a * b + c)


def test_fp32_fma_rounds_once():
    a = torch.full((16,), 1 + 2.0**-12)
    got = torch.zeros(16)
    _fused[(1,)](a, a, torch.full((16,), -1.0), got, N=16)
    assert torch.equal(got, torch.full((16,), 2.0**-11 + 2.0**-24))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16])
def test_dot_of_narrow_operands(dtype):
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    got = torch.zeros(16, 16)
    _dot[(1,)](a, b, got, N=16)
    want = a.double() @ b.double()
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_narrow_comparison_compares_values():
    a, b = torch.randn(2, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    got = torch.zeros_like(a)
    _larger[(1,)](a, b, got, N=256)
    assert torch.equal(got, torch.maximum(a, b))


def test_maximum_drops_nan():
    a = torch.tensor([torch.nan, 1.0, torch.nan, 2.0])
    b = torch.tensor([3.0, torch.nan, torch.nan, 5.0])
    got = torch.zeros(4)
    _maximum[(1,)](a, b, got, N=4)
    torch.testing.assert_close(got, torch.fmax(a, b), equal_nan=True)


def test_installing_twice_changes_nothing():
    before = vars(interpreter.interpreter.InterpreterBuilder).copy()
    interpreter.install()
    assert vars(interpreter.interpreter.InterpreterBuilder).copy() == before
