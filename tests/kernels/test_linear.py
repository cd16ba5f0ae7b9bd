"""Linear references against fp64 formulas, hand-computed cases and the invariance contract."""

import math

import pytest
import torch
from weight_cases import assert_rows_invariant, generator, random_fp8, random_rows

from dspark.kernels.common import row_chunks
from dspark.kernels.common.fp8 import decode_e8m0
from dspark.kernels.linear import (
    act_quant,
    bf16_linear,
    bf16_linear_parts,
    dequantise_fp8,
    fp8_linear,
    fp8_linear_parts,
    grouped_linear,
    prepare_bf16,
    prepare_fp8,
    rms_norm,
    swiglu,
    swiglu_linear,
)

FP8 = torch.float8_e4m3fn


def test_e8m0_bytes_are_powers_of_two():
    decoded = decode_e8m0(torch.tensor([0, 1, 126, 127, 128, 254], dtype=torch.uint8))
    assert decoded.tolist() == [0.0, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]


def test_act_quant_scale_is_the_next_power_of_two():
    x = torch.zeros(4, 128)
    x[0, 3] = 448.0  # exactly representable: scale 1
    x[1, 3] = 449.0  # just above: scale 2
    x[2, 3] = -56.0  # 448/8
    codes, scale = act_quant(x.bfloat16())
    assert scale.tolist() == [[1.0], [1.0], [0.125], [2.0**-22]]  # bf16(449) is 448; floor 1e-4
    codes32, scale32 = act_quant(x)
    assert scale32[1].item() == 2.0
    assert codes[0, 3].float() == 448.0
    assert codes32[1, 3].float() == 224.0
    assert codes[2, 3].float() == -448.0
    assert math.frexp(1e-4 / 448)[1] == -22  # the floor's next power of two is 2^-22


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_stacked_matrices_equal_each_alone(dtype):
    x = random_rows(5, 256).to(dtype)
    w = random_fp8(128 + 64, 256)
    first, second = (
        prepare_fp8(w.codes[:128], w.scales[:1]),
        prepare_fp8(w.codes[128:], w.scales[1:]),
    )
    a, b = fp8_linear_parts(x, w, (128, 64))
    assert a.equal(fp8_linear(x, first))
    assert b.equal(fp8_linear(x, second))
    rows = random_rows(391, 256, seed=3)
    got = bf16_linear_parts(x, prepare_bf16(rows), (128, 256, 7), torch.float32)
    for y, part in zip(got, rows.split((128, 256, 7)), strict=True):
        assert y.equal(bf16_linear(x, prepare_bf16(part), torch.float32))


def test_stacked_matrices_refuse_parts_that_do_not_fit():
    x, w = random_rows(1, 256), random_fp8(192, 256)
    with pytest.raises(ValueError, match="parts of 192 weight rows"):
        fp8_linear_parts(x, w, (128, 65))
    with pytest.raises(ValueError, match="whole blocks of 128 rows"):
        fp8_linear_parts(x, w, (64, 128))


def test_act_quant_without_pow2_keeps_the_exact_scale():
    x = torch.full((1, 128), 3.0)
    codes, scale = act_quant(x, pow2=False)
    assert scale.item() == pytest.approx(3.0 / 448, rel=1e-7)
    assert (codes.float() == 448.0).all()


def test_act_quant_masks_the_tail_of_k():
    x = random_rows(3, 192)
    codes, scale = act_quant(x)
    assert codes.shape == (3, 192)
    assert scale.shape == (3, 2)
    alone, tail = act_quant(x[:, 128:].contiguous())
    assert torch.equal(codes[:, 128:].float(), alone.float())
    assert torch.equal(scale[:, 1:], tail)


@pytest.mark.parametrize(("n", "k"), [(128, 128), (192, 128), (256, 64), (64, 320)])
def test_fp8_linear_matches_the_dequantised_product(n, k):
    w, x = random_fp8(n, k), random_rows(5, k)
    codes, scale = act_quant(x)
    used = codes.double() * scale.double().repeat_interleave(128, 1)[:, :k]
    want = used @ dequantise_fp8(w.codes, w.scales).t()
    assert torch.equal(fp8_linear(x, w), want.bfloat16())
    assert torch.equal(fp8_linear(x, w, torch.float32), want.float())
    # Activation rounding is 2^-4 relative per element, so the true product is near.
    true = x.double() @ w.dense.t()
    assert (want - true).norm() / true.norm() < 0.05


def test_fp8_block_scales_apply_to_their_own_block():
    codes = torch.ones(256, 256).to(FP8)
    w = prepare_fp8(codes, torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8))
    assert w.dense[0, 0] == 1
    assert w.dense[127, 128] == 2
    assert w.dense[128, 127] == 4
    assert w.dense[255, 255] == 8


def test_oracle_mode_does_not_quantise():
    w, x = random_fp8(128, 256), random_rows(3, 256).float() * 1.001
    assert torch.equal(fp8_linear(x, w), (x.double() @ w.dense.t()).float())


def test_bf16_linear_rounds_once():
    x, w = random_rows(7, 96), prepare_bf16(random_rows(40, 96, seed=2))
    want = x.double() @ w.weight.double().t()
    assert torch.equal(bf16_linear(x, w), want.bfloat16())
    assert torch.equal(bf16_linear(x, w, torch.float32), want.float())


@pytest.mark.parametrize("act_dtype", [torch.bfloat16, torch.float32])
def test_swiglu_linear_is_both_ops(act_dtype):
    gate_up, w = torch.randn(4, 256, generator=generator(6)) * 8, random_fp8(64, 128)
    h = swiglu(gate_up, 10.0, out_dtype=act_dtype)
    assert torch.equal(swiglu_linear(gate_up, w, 10.0, act_dtype=act_dtype), fp8_linear(h, w))


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_grouped_linear_uses_each_group_only_once(kind):
    groups, rank, k = 3, 64, 256
    w = random_fp8(groups * rank, k)
    if kind == "bf16":
        w = prepare_bf16(w.dense.bfloat16())
    o = random_rows(4, groups, k)
    got = grouped_linear(o, w)
    for g in range(groups):
        want = o[:, g].double() @ w.dense[g * rank : (g + 1) * rank].t()
        assert torch.equal(got[:, g * rank : (g + 1) * rank], want.bfloat16())


def test_rms_norm_by_hand():
    x = torch.tensor([[3.0, 4.0]])
    got = rms_norm(x, torch.tensor([1.0, 2.0]), 0.0)
    assert got.tolist()[0] == pytest.approx([3 / math.sqrt(12.5), 8 / math.sqrt(12.5)], rel=1e-6)
    assert rms_norm(random_rows(2, 3, 64), torch.ones(64), 1e-6).shape == (2, 3, 64)


def test_rows_are_batch_invariant():
    x, norm = random_rows(48, 256), random_rows(256, seed=4)
    fp8, bf16 = random_fp8(192, 256), prepare_bf16(random_rows(96, 256, seed=3))
    grouped = random_fp8(2 * 64, 128)
    for op in (
        lambda rows: fp8_linear(rows, fp8, torch.float32),
        lambda rows: bf16_linear(rows, bf16, torch.float32),
        lambda rows: grouped_linear(rows.view(-1, 2, 128), grouped),
        lambda rows: rms_norm(rows, norm, 1e-6),
    ):
        assert_rows_invariant(lambda index, op=op: op(x[index]), 48)


def test_row_chunks_do_not_change_rows(monkeypatch):
    x, w = random_rows(48, 128), random_fp8(64, 128)
    whole = fp8_linear(x, w)
    monkeypatch.setattr(row_chunks, "ROW_CHUNK", 10)
    assert torch.equal(fp8_linear(x, w), whole)


def test_nan_stays_in_its_row():
    x, w = random_rows(4, 256), random_fp8(128, 256)
    clean = fp8_linear(x, w)
    x[2, 5] = float("nan")
    x[3, 7] = float("inf")
    got = fp8_linear(x, w)
    assert torch.equal(got[:2], clean[:2])
    assert got[2].isnan().all()
    assert not got[3].isfinite().any()


def test_no_rows():
    w, b = random_fp8(128, 256), prepare_bf16(random_rows(40, 256))
    empty = torch.empty(0, 256, dtype=torch.bfloat16)
    assert fp8_linear(empty, w).shape == (0, 128)
    assert bf16_linear(empty, b).shape == (0, 40)
    assert grouped_linear(empty.view(0, 1, 256), w).shape == (0, 128)
    assert rms_norm(empty, torch.ones(256), 1e-6).shape == (0, 256)
    assert act_quant(empty)[1].shape == (0, 2)


def test_bad_weights_are_refused():
    codes = torch.zeros(128, 128).to(FP8)
    with pytest.raises(ValueError, match="byte 255"):
        prepare_fp8(codes, torch.tensor([[255]], dtype=torch.uint8))
    with pytest.raises(ValueError, match="needs scales"):
        prepare_fp8(codes, torch.ones(2, 1))
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        prepare_fp8(codes.float(), torch.ones(1, 1))
    with pytest.raises(ValueError, match="E8M0 bytes or float32"):
        prepare_fp8(codes, torch.ones(1, 1).half())
    with pytest.raises(ValueError, match="columns"):
        fp8_linear(random_rows(1, 64), random_fp8(128, 128))
    with pytest.raises(ValueError, match="groups"):
        grouped_linear(random_rows(1, 3, 128), random_fp8(128, 128))
