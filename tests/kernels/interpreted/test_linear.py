"""Linear kernels under the interpreter against their references, at shapes of a few programs."""

import pytest
import torch
from weight_cases import assert_close, generator, random_fp8, random_rows

from dspark.kernels.linear import kernel, prepare_bf16, reference


@pytest.mark.parametrize(("rows", "k"), [(1, 128), (5, 256), (3, 192)])
@pytest.mark.parametrize("pow2", [True, False])
def test_act_quant_is_exact(rows, k, pow2):
    x = random_rows(rows, k) * 37
    x[0, :128] = 0
    x[-1, 5] = 448 * 2.0**3  # exactly at a power of two times 448
    q, scale = kernel.act_quant(x, 128, pow2)
    want_q, want_scale = reference.act_quant(x, 128, pow2)
    assert torch.equal(scale, want_scale)
    assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8))


def test_act_quant_scale_follows_every_mantissa():
    """The integer rule for the scale equals ceil-to-power-of-two of amax/448 at each bf16 value."""
    mantissas = torch.arange(0x3F80, 0x4080, dtype=torch.int16).view(torch.bfloat16)  # [1, 4)
    x = torch.zeros(256, 128, dtype=torch.bfloat16)
    x[:, 0] = mantissas
    assert torch.equal(kernel.act_quant(x, 128, True)[1], reference.act_quant(x, 128, True)[1])


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 64, 128), (3, 100, 512), (2, 64, 192)])
def test_fp8_linear(rows, n, k):
    x, w = random_rows(rows, k), random_fp8(n, k)
    assert_close(kernel.fp8_linear(x, w, None), reference.fp8_linear(x, w))
    got = kernel.fp8_linear(x, w, torch.float32)
    assert_close(got, reference.fp8_linear(x, w, torch.float32), 2e-6)


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 64, 128), (3, 100, 512), (2, 64, 192)])
def test_bf16_linear(rows, n, k):
    x, w = random_rows(rows, k), prepare_bf16(random_rows(n, k, seed=2))
    assert_close(kernel.bf16_linear(x, w, None), reference.bf16_linear(x, w))
    got = kernel.bf16_linear(x, w, torch.float32)
    assert_close(got, reference.bf16_linear(x, w, torch.float32), 2e-6)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("prefill", [False, True])
def test_stacked_fp8_matrices_equal_each_alone(rows, prefill, monkeypatch):
    """Same K order, so the same bits; wq_a above wkv, one program more than either."""
    if prefill:
        monkeypatch.setattr(kernel, "DECODE_ROWS", 0)
    x, w = random_rows(rows, 512), random_fp8(128 + 64, 512)
    assert kernel.split_k(192, 512) == kernel.split_k(128, 512) == kernel.split_k(64, 512) == 2
    first = reference.Fp8Weight(w.codes[:128], w.scales[:1], None)
    second = reference.Fp8Weight(w.codes[128:], w.scales[1:], None)
    a, b = kernel.fp8_linear_parts(x, w, (128, 64), None)
    assert a.is_contiguous()
    assert b.is_contiguous()
    assert torch.equal(a, kernel.fp8_linear(x, first, None))
    assert torch.equal(b, kernel.fp8_linear(x, second, None))


def test_three_stacked_bf16_matrices_equal_each_alone():
    parts = (128, 256, 9)
    x, w = random_rows(3, 256), random_rows(sum(parts), 256, seed=2)
    got = kernel.bf16_linear_parts(x, prepare_bf16(w), parts, torch.float32)
    for y, rows in zip(got, w.split(parts), strict=True):
        assert torch.equal(y, kernel.bf16_linear(x, prepare_bf16(rows), torch.float32))


def test_swiglu():
    gate_up = torch.randn(3, 2 * 40, generator=generator(6)) * 12
    got = kernel.swiglu(gate_up, 10.0, out_dtype=torch.float32)
    want = reference.swiglu(gate_up, 10.0, out_dtype=torch.float32)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("k", [256, 192])
def test_swiglu_linear(k, monkeypatch):
    gate_up, w = torch.randn(3, 2 * k, generator=generator(6)) * 5, random_fp8(64, k)
    dtypes = {"act_dtype": torch.bfloat16, "out_dtype": torch.float32}
    got = kernel.swiglu_linear(gate_up, w, 10.0, **dtypes)
    assert_close(got, reference.swiglu_linear(gate_up, w, 10.0, **dtypes))
    monkeypatch.setattr(kernel, "DECODE_ROWS", 0)  # prefill: three launches
    apart = kernel.swiglu_linear(gate_up, w, 10.0, **dtypes)
    assert torch.equal(apart, got)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_grouped_linear(kind):
    w = random_fp8(2 * 64, 256)
    if kind == "bf16":
        w = prepare_bf16(w.dense.bfloat16())
    o = random_rows(3, 2, 256)
    assert_close(kernel.grouped_linear(o, w), reference.grouped_linear(o, w))


def test_split_sum_equals_one_program(monkeypatch):
    """Decode spreads the parts of K over programs, prefill does not: the bits are the same."""
    x, w = random_rows(3, 512), random_fp8(64, 512)
    assert kernel.split_k(64, 512) == 2
    split = kernel.fp8_linear(x, w, torch.float32)
    monkeypatch.setattr(kernel, "DECODE_ROWS", 0)
    assert torch.equal(kernel.fp8_linear(x, w, torch.float32), split)


def test_rows_do_not_depend_on_their_batch():
    x, w = random_rows(18, 128), random_fp8(64, 128)
    whole = kernel.fp8_linear(x, w, torch.float32)
    assert torch.equal(kernel.fp8_linear(x[4:5], w, torch.float32), whole[4:5])
    assert torch.equal(kernel.fp8_linear(x[:6], w, torch.float32), whole[:6])


def test_nan_stays_in_its_row():
    x, w = random_rows(3, 128), random_fp8(64, 128)
    clean = kernel.fp8_linear(x, w, None)
    x[1, 7] = float("nan")
    got = kernel.fp8_linear(x, w, None)
    assert torch.equal(got[[0, 2]], clean[[0, 2]])
    assert got[1].isnan().all()


@pytest.mark.parametrize("width", [64, 100])
def test_rms_norm(width):
    x, w = random_rows(2, 3, width), random_rows(width, seed=2)
    assert_close(kernel.rms_norm(x, w, 1e-6), reference.rms_norm(x, w, 1e-6))


def test_no_rows():
    w = random_fp8(64, 128)
    empty = torch.empty(0, 128, dtype=torch.bfloat16)
    assert kernel.fp8_linear(empty, w, None).shape == (0, 64)
    parts = kernel.fp8_linear_parts(empty, random_fp8(192, 128), (128, 64), None)
    assert [part.shape for part in parts] == [(0, 128), (0, 64)]
    assert kernel.rms_norm(empty, torch.ones(128), 1e-6).shape == (0, 128)
