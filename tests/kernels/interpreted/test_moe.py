"""Expert kernels under the interpreter against their references."""

import pytest
import torch
from weight_cases import assert_close, generator, random_experts, random_route, random_rows

from dspark.kernels.linear.reference import swiglu
from dspark.kernels.moe import kernel, prepare_experts, reference
from dspark.kernels.moe.words import streamed


def run(x, experts, route, limit, shared):
    """The kernels, on the words that a GPU would hold."""
    return kernel.moe_mxfp4(x, streamed(*experts[:4]), route, limit, shared)


def case(rows, count=4, hidden=128, width=64, k=2, seed=1):
    route = random_route(rows, count, k)
    return random_rows(rows, hidden, seed=seed), random_experts(count, hidden, width), route


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shared", [None, torch.float32, torch.bfloat16])
def test_decode_matches_the_reference(rows, shared):
    x, experts, route = case(rows)
    extra = None if shared is None else torch.randn(rows, 128, generator=generator(6)).to(shared)
    got = run(x, experts, route, 10.0, extra)
    assert_close(got, reference.moe_mxfp4(x, experts, route, 10.0, extra))


@pytest.mark.parametrize("sorted_pairs", [0, 2048])
def test_prefill_matches_the_reference(monkeypatch, sorted_pairs):
    """Sorted tiles, tall or small, in-program split sums and two column ranges."""
    x, experts, route = case(5, hidden=2048, width=64)
    want = reference.moe_mxfp4(x, experts, route, 10.0, None)
    monkeypatch.setattr(kernel, "MANY_PAIRS", 0)
    monkeypatch.setattr(kernel, "SORTED_PAIRS", sorted_pairs)
    monkeypatch.setattr(kernel, "PREFILL_SLOTS_BYTES", 4 * 10 * 1024)
    assert_close(run(x, experts, route, 10.0, None), want)


def test_a_row_has_the_same_bits_in_every_regime(monkeypatch):
    """Programs of pairs, tiles that find their rows, small sorted tiles, tall sorted tiles."""
    x, experts, route = case(3, count=2, hidden=2048, width=32)
    found = []
    for few, many, short in ((64, 512, 2048), (0, 512, 2048), (0, 0, 2048), (0, 0, 0)):
        monkeypatch.setattr(kernel, "FEW_PAIRS", few)
        monkeypatch.setattr(kernel, "MANY_PAIRS", many)
        monkeypatch.setattr(kernel, "SORTED_PAIRS", short)
        found.append(run(x, experts, route, 10.0, None))
    for other in found[1:]:
        assert torch.equal(other, found[0])


@pytest.mark.parametrize(("hidden", "width"), [(64, 32), (192, 96), (192, 256), (384, 160)])
@pytest.mark.parametrize("few_pairs", [64, 0])
def test_widths_that_fill_no_tile(monkeypatch, hidden, width, few_pairs):
    monkeypatch.setattr(kernel, "FEW_PAIRS", few_pairs)
    x, experts, route = case(3, hidden=hidden, width=width)
    want = reference.moe_mxfp4(x, experts, route, 10.0, None)
    assert_close(run(x, experts, route, 10.0, None), want)


@pytest.mark.parametrize("hidden", [128, 4096])
def test_tiles_of_decode_match_the_reference(monkeypatch, hidden):
    x, experts, route = case(3, hidden=hidden)
    monkeypatch.setattr(kernel, "FEW_PAIRS", 0)
    want = reference.moe_mxfp4(x, experts, route, 10.0, None)
    assert_close(run(x, experts, route, 10.0, None), want)


def test_a_crowded_expert_takes_several_tiles(monkeypatch):
    x, experts, route = case(20, count=2, k=1)
    monkeypatch.setattr(kernel, "FEW_PAIRS", 0)
    got = run(x, experts, route, 10.0, None)
    assert_close(got, reference.moe_mxfp4(x, experts, route, 10.0, None))


def test_rows_do_not_depend_on_their_batch():
    x, experts, route = case(6)
    whole = run(x, experts, route, 10.0, None)
    for i in (0, 4):
        alone = reference.Route(route.weights[i : i + 1], route.experts[i : i + 1])
        assert torch.equal(run(x[i : i + 1], experts, alone, 10.0, None), whole[i : i + 1])


@pytest.mark.parametrize("hidden", [128, 2048, 4096])
@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_every_regime_has_the_same_bits(monkeypatch, hidden, k):
    """One, two or four parts of the sum, in one mma, in a loop of tiles, in sorted tiles."""
    x, experts, route = case(2, count=7, hidden=hidden, k=k)
    few = run(x, experts, route, 10.0, None)
    monkeypatch.setattr(kernel, "FEW_PAIRS", 0)
    assert torch.equal(run(x, experts, route, 10.0, None), few)
    monkeypatch.setattr(kernel, "MANY_PAIRS", 0)
    assert torch.equal(run(x, experts, route, 10.0, None), few)


@pytest.mark.parametrize("few_pairs", [64, 0])
def test_padded_and_nan_rows_stay_alone(monkeypatch, few_pairs):
    monkeypatch.setattr(kernel, "FEW_PAIRS", few_pairs)
    x, experts, route = case(4)
    shared = torch.randn(4, 128, generator=generator(6))
    clean = run(x, experts, route, 10.0, shared)
    x[1] = float("nan")
    x[2, 0] = float("nan")
    route.experts[1], route.weights[1] = -1, 0.0
    got = run(x, experts, route, 10.0, shared)
    assert torch.equal(got[[0, 3]], clean[[0, 3]])
    assert torch.equal(got[1], shared[1].bfloat16())
    assert got[2].isnan().all()


def test_more_experts_a_row_than_an_mma_has_columns():
    x, experts, route = case(2, count=12, k=10)
    assert_close(
        run(x, experts, route, 10.0, None), reference.moe_mxfp4(x, experts, route, 10.0, None)
    )


def test_no_rows():
    x, experts, route = case(1)
    none = reference.Route(route.weights[:0], route.experts[:0])
    assert run(x[:0], experts, none, 10.0, None).shape == (0, 128)


@pytest.mark.parametrize("few_pairs", [64, 0])
def test_no_row_has_an_expert(monkeypatch, few_pairs):
    monkeypatch.setattr(kernel, "FEW_PAIRS", few_pairs)
    x, experts, route = case(2)
    route.experts.fill_(-1)
    assert (run(x, experts, route, 10.0, None) == 0).all()


@pytest.mark.parametrize("byte_value", [0, 1, 126, 127, 128])
def test_weights_decode_exactly(byte_value):
    """A one-hot row reads a column of w13 through the whole kernel; every code, awkward scales."""
    hidden = width = 64
    w13 = torch.zeros(1, 2 * width, hidden // 2, dtype=torch.uint8)
    codes = torch.arange(2 * width) % 16
    w13[0, :, 5] = (codes << 4).to(torch.uint8)  # odd column 11
    w13[0, :, 4] = 0xFF
    s13 = torch.full((1, 2 * width, hidden // 32), byte_value, dtype=torch.uint8)
    w2 = torch.zeros(1, hidden, width // 2, dtype=torch.uint8)
    s2 = torch.full((1, hidden, width // 32), 127, dtype=torch.uint8)
    i = torch.arange(width)
    w2[0, i, i // 2] = torch.where(i % 2 == 0, 0x02, 0x20).to(torch.uint8)  # identity
    experts = prepare_experts(w13, s13, w2, s2)
    x = torch.zeros(1, hidden, dtype=torch.bfloat16)
    x[0, 11] = 1.0
    chosen = reference.Route(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))
    got = run(x, experts, chosen, 1e30, None)
    column = experts.dense13[0, :, 11]
    want = swiglu(column[None], 1e30, out_dtype=torch.bfloat16)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=0)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("kind", ["plain", "bias", "hash"])
def test_route(kind, renormalise):
    g = generator(4)
    logits = torch.randn(5, 12, generator=g) * 3
    logits[0] = 0.0  # all tied
    ids = torch.tensor([0, 1, -1, 2, 1])
    bias = torch.randn(12, generator=g) if kind == "bias" else None
    table = None
    if kind == "hash":
        table = torch.tensor([[3, 0, 7], [11, 1, 2], [5, 5, 4]], dtype=torch.int32)
    got = kernel.route(logits, bias, table, ids, 3, 1.5, renormalise)
    want = reference.route(logits, bias, table, ids, 3, 1.5, renormalise)
    assert torch.equal(got.experts, want.experts)
    torch.testing.assert_close(got.weights, want.weights, rtol=3e-6, atol=0)


def test_route_of_a_nan_row_still_fills_its_slots():
    logits = torch.full((1, 8), float("nan"))
    got = kernel.route(logits, None, None, torch.tensor([0]), 3, 1.5)
    assert got.experts.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("logit", [-30.0, -8.0, -4.6, -1e-3, 0.0, 0.3, 5.0, 40.0])
def test_score_is_accurate_where_log1p_is_delicate(logit):
    got = kernel.route(torch.tensor([[logit]]), None, None, torch.tensor([0]), 1, 1.0, False)
    want = torch.nn.functional.softplus(torch.tensor(logit).double()).sqrt()
    assert got.weights.item() == pytest.approx(want.item(), rel=1e-6)


def test_sorted_tiles_cover_every_pair_once():
    g = generator(5)
    experts = torch.randint(-1, 6, (50,), generator=g).int()
    order, tiles = kernel.sorted_tiles(experts, 6, 4)
    seen = []
    for expert, start, end in tiles.tolist():
        members = order[start:end].tolist()
        assert len(members) <= 4
        assert members == sorted(members)
        assert all(experts[m] == expert for m in members)
        seen += members
    assert sorted(seen) == (experts >= 0).nonzero().flatten().tolist()
