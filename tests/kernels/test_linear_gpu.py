"""Linears on a GPU at the matrices of one rank, against the fp64 reference on the CPU."""

import pytest
import torch
from weight_cases import (
    assert_close,
    assert_rows_invariant,
    generator,
    random_fp8,
    random_rows,
)

from dspark.kernels.linear import (
    Fp8Weight,
    act_quant,
    bf16_linear,
    bf16_linear_parts,
    fp8_linear,
    fp8_linear_parts,
    grouped_linear,
    prepare_bf16,
    prepare_fp8,
    reference,
    rms_norm,
    swiglu,
    swiglu_linear,
)

# Tensor cores truncate when they add to an f32 accumulator: K/16 such sums give a few 1e-6.
F32_BOUND = 1e-5
pytestmark = pytest.mark.gpu

ROWS = [1, 2, 6, 8, 16, 17, 48, 64, 65, 300]
FP8_MATRICES = [(1536, 4096), (4096, 1024), (8192, 1024), (512, 4096), (4096, 256), (512, 12288)]
BF16_MATRICES = [(2048, 4096), (1024, 4096), (512, 4096), (256, 4096), (64, 4096), (16160, 4096)]


def on(device: torch.device, w: Fp8Weight) -> Fp8Weight:
    return prepare_fp8(w.codes.to(device), w.scales.to(device))


@pytest.mark.parametrize("shape", FP8_MATRICES, ids=str)
def test_fp8_linear(device, shape):
    w = random_fp8(*shape)
    for rows in ROWS:
        x = random_rows(rows, shape[1], seed=rows)
        got = fp8_linear(x.to(device), on(device, w), torch.float32)
        # Scales are exact and products are, so only the order of an f32 sum differs.
        assert_close(got, reference.fp8_linear(x, w, torch.float32), F32_BOUND)
        assert_close(fp8_linear(x.to(device), on(device, w)), reference.fp8_linear(x, w))


@pytest.mark.parametrize("shape", BF16_MATRICES, ids=str)
def test_bf16_linear(device, shape):
    weight = random_rows(*shape, seed=2)
    for rows in (1, 6, 48, 65):
        x = random_rows(rows, shape[1], seed=rows)
        got = bf16_linear(x.to(device), prepare_bf16(weight.to(device)), torch.float32)
        assert_close(got, reference.bf16_linear(x, prepare_bf16(weight), torch.float32), F32_BOUND)


@pytest.mark.parametrize(("parts", "k"), [((1024, 512), 4096), ((4096, 8192), 1024)], ids=str)
def test_stacked_fp8_matrices_differ_from_one_only_in_where_they_write(device, parts, k):
    w = on(device, random_fp8(sum(parts), k))
    for rows in ROWS:
        x = random_rows(rows, k, seed=rows).to(device)
        whole = fp8_linear(x, w).split(parts, 1)
        for got, want in zip(fp8_linear_parts(x, w, parts), whole, strict=True):
            assert got.is_contiguous()
            assert torch.equal(got, want)


def test_stacked_bf16_matrices_differ_from_one_only_in_where_they_write(device):
    parts = (2048, 512, 64)
    w = prepare_bf16(random_rows(sum(parts), 4096, seed=2).to(device))
    for rows in ROWS:
        x = random_rows(rows, 4096, seed=rows).to(device)
        whole = bf16_linear(x, w, torch.float32).split(parts, 1)
        for got, want in zip(bf16_linear_parts(x, w, parts, torch.float32), whole, strict=True):
            assert got.is_contiguous()
            assert torch.equal(got, want)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_grouped_linear(device, kind, groups):
    w = random_fp8(groups * 192, 4096)
    moved = on(device, w)
    if kind == "bf16":
        w = prepare_bf16(w.dense.bfloat16())
        moved = prepare_bf16(w.weight.to(device))
    for rows in (1, 6, 48, 100):
        o = random_rows(rows, groups, 4096, seed=rows)
        assert_close(grouped_linear(o.to(device), moved), reference.grouped_linear(o, w))


@pytest.mark.parametrize("rows", [1, 6, 48, 70])
def test_swiglu_linear(device, rows):
    gate_up, w = torch.randn(rows, 512, generator=generator(6)) * 5, random_fp8(4096, 256)
    precision = {"act_dtype": torch.bfloat16, "out_dtype": torch.float32}
    got = swiglu_linear(gate_up.to(device), on(device, w), 10.0, **precision)
    assert_close(got, reference.swiglu_linear(gate_up, w, 10.0, **precision))
    h = swiglu(gate_up.to(device), 10.0, out_dtype=torch.bfloat16)
    assert torch.equal(fp8_linear(h, on(device, w), torch.float32), got)


@pytest.mark.parametrize("k", [128, 192, 4096])
def test_act_quant_is_exact(device, k):
    x = random_rows(70, k) * torch.logspace(-6, 4, 70).unsqueeze(1).bfloat16()
    for pow2 in (True, False):
        q, scale = act_quant(x.to(device), pow2=pow2)
        want_q, want_scale = reference.act_quant(x, pow2=pow2)
        assert torch.equal(scale.cpu(), want_scale)
        assert torch.equal(q.cpu().view(torch.uint8), want_q.view(torch.uint8))


@pytest.mark.parametrize("width", [128, 1024, 4096])
def test_rms_norm(device, width):
    x, w = random_rows(50, width), random_rows(width, seed=2)
    assert_close(rms_norm(x.to(device), w.to(device), 1e-6), reference.rms_norm(x, w, 1e-6))


@pytest.mark.parametrize("shape", [(1536, 4096), (4096, 1024), (100, 192)], ids=str)
def test_rows_do_not_depend_on_their_batch(device, shape):
    """Across every tile height and from decode into prefill."""
    x = random_rows(100, shape[1]).to(device)
    fp8, bf16 = on(device, random_fp8(*shape)), prepare_bf16(random_rows(*shape).to(device))
    norm = random_rows(shape[1], seed=4).to(device)
    for op in (
        lambda rows: fp8_linear(rows, fp8, torch.float32),
        lambda rows: bf16_linear(rows, bf16, torch.float32),
        lambda rows: grouped_linear(rows.unsqueeze(1), fp8),
        lambda rows: rms_norm(rows, norm, 1e-6),
    ):
        whole = assert_rows_invariant(lambda i, op=op: op(x[i.to(device)]).cpu(), 100)
        for count in (8, 16, 17, 48, 64, 65):
            assert torch.equal(op(x[:count]).cpu(), whole[:count])


def test_two_runs_are_equal(device):
    """Splits finish in any order; the sum does not."""
    x, w = random_rows(6, 4096).to(device), on(device, random_fp8(1536, 4096))
    first = fp8_linear(x, w, torch.float32)
    assert all(torch.equal(fp8_linear(x, w, torch.float32), first) for _ in range(50))


def test_nan_stays_in_its_row(device):
    x, w = random_rows(48, 4096).to(device), on(device, random_fp8(1536, 4096))
    clean = fp8_linear(x, w)
    x[5, 77] = float("nan")
    got = fp8_linear(x, w)
    keep = torch.arange(48) != 5
    assert torch.equal(got[keep], clean[keep])
    assert got[5].isnan().all()


def test_graph_replay(device):
    """Captured once, replayed on new rows: split counters are ready for every replay."""
    w = on(device, random_fp8(1536, 4096))
    x = random_rows(6, 4096).to(device)
    fp8_linear(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fp8_linear(x, w)
    for seed in range(5):
        rows = random_rows(6, 4096, seed=seed).to(device)
        x.copy_(rows)
        graph.replay()
        assert torch.equal(y, fp8_linear(rows, w))
