"""Experts on a GPU at the shapes of one rank, against the fp64 reference on the CPU."""

import pytest
import torch
from weight_cases import (
    assert_close,
    assert_rows_invariant,
    generator,
    random_experts,
    random_route,
    random_rows,
)

from dspark.kernels.moe import (
    Route,
    kernel,
    moe_mxfp4,
    prepare_experts,
    reference,
    route,
)

pytestmark = pytest.mark.gpu

LIMIT, HIDDEN, WIDTH, EXPERTS, TOPK = 10.0, 4096, 256, 16, 6


@pytest.fixture(scope="module")
def experts():
    return random_experts(EXPERTS, HIDDEN, WIDTH)


@pytest.fixture
def on_gpu(experts, device):
    return prepare_experts(*(t.to(device) for t in experts[:4]))


def moved(chosen: Route, device) -> Route:
    return Route(chosen.weights.to(device), chosen.experts.to(device))


@pytest.mark.parametrize("rows", [1, 2, 6, 8, 10, 11, 48, 64, 85, 86, 300])
def test_experts(device, experts, on_gpu, rows):
    x, chosen = random_rows(rows, HIDDEN), random_route(rows, EXPERTS, TOPK)
    shared = random_rows(rows, HIDDEN, seed=5)
    for extra in (None, shared, shared.float()):
        got = moe_mxfp4(
            x.to(device),
            on_gpu,
            moved(chosen, device),
            LIMIT,
            None if extra is None else extra.to(device),
        )
        assert_close(got, reference.moe_mxfp4(x, experts, chosen, LIMIT, extra))


@pytest.mark.parametrize(
    ("hidden", "width"),
    [(128, 128), (128, 64), (192, 256), (384, 96), (4096, 2048), (2048, 512)],
)
def test_other_shapes(device, hidden, width):
    weights = random_experts(4, hidden, width)
    on_device = prepare_experts(*(t.to(device) for t in weights[:4]))
    for rows in (1, 6, 40, 300, 1100):
        x, chosen = random_rows(rows, hidden), random_route(rows, 4, 2)
        got = moe_mxfp4(x.to(device), on_device, moved(chosen, device), LIMIT, None)
        assert_close(got, reference.moe_mxfp4(x, weights, chosen, LIMIT, None))


def test_rows_do_not_depend_on_their_batch(device, on_gpu):
    """Across every tile height and from decode into prefill."""
    rows = 400
    x, chosen = (
        random_rows(rows, HIDDEN).to(device),
        moved(random_route(rows, EXPERTS, TOPK), device),
    )
    shared = random_rows(rows, HIDDEN, seed=5).to(device)

    def run(index):
        i = index.to(device)
        picked = Route(chosen.weights[i], chosen.experts[i])
        return moe_mxfp4(x[i], on_gpu, picked, LIMIT, shared[i]).cpu()

    whole = assert_rows_invariant(run, rows)
    for count in (8, 10, 11, 48, 64, 85, 86, 96, 288, 341, 342):
        assert torch.equal(run(torch.arange(count)), whole[:count])


def test_two_runs_are_equal(device, on_gpu):
    x, chosen = random_rows(48, HIDDEN).to(device), moved(random_route(48, EXPERTS, TOPK), device)
    first = moe_mxfp4(x, on_gpu, chosen, LIMIT, None)
    assert all(torch.equal(moe_mxfp4(x, on_gpu, chosen, LIMIT, None), first) for _ in range(50))


def test_one_expert_takes_every_row(device, experts, on_gpu):
    x = random_rows(40, HIDDEN)
    chosen = Route(torch.ones(40, 1), torch.full((40, 1), 3, dtype=torch.int32))
    got = moe_mxfp4(x.to(device), on_gpu, moved(chosen, device), LIMIT, None)
    assert_close(got, reference.moe_mxfp4(x, experts, chosen, LIMIT, None))


@pytest.mark.parametrize("rows", [8, 48, 100])
def test_padded_and_nan_rows_stay_alone(device, on_gpu, rows):
    x, chosen = random_rows(rows, HIDDEN).to(device), moved(random_route(rows, EXPERTS, 6), device)
    shared = random_rows(rows, HIDDEN, seed=5).to(device)
    clean = moe_mxfp4(x, on_gpu, chosen, LIMIT, shared)
    x[1], x[4, 0] = float("nan"), float("nan")
    chosen.experts[1], chosen.weights[1] = -1, 0.0
    got = moe_mxfp4(x, on_gpu, chosen, LIMIT, shared)
    keep = [i for i in range(rows) if i not in (1, 4)]
    assert torch.equal(got[keep], clean[keep])
    assert torch.equal(got[1], shared[1])
    assert got[4].isnan().all()


@pytest.mark.parametrize("byte", [0, 1, 100, 126, 127, 128])
def test_weights_decode_exactly(device, byte):
    """One-hot rows read columns of w2 through a whole layer: every code, awkward scales.

    Gate 6, up 2^-k so that h is a known bf16 number; w2 is the matrix under test.
    """
    hidden, width = 128, 64
    w13 = torch.zeros(1, 2 * width, hidden // 2, dtype=torch.uint8)
    i = torch.arange(width)
    high = i % 2 == 1
    w13[0, i, i // 2] = torch.where(high, 0x70, 0x07).to(torch.uint8)  # gate row i: 6 * x[i]
    w13[0, width + i, i // 2] = torch.where(high, 0x20, 0x02).to(torch.uint8)  # up row i: x[i]
    s13 = torch.full((1, 2 * width, hidden // 32), 127, dtype=torch.uint8)
    codes = torch.randint(0, 256, (1, hidden, width // 2), generator=generator(1))
    s2 = torch.full((1, hidden, width // 32), byte, dtype=torch.uint8)
    weights = prepare_experts(w13, s13, codes.to(torch.uint8), s2)
    x = torch.eye(width, hidden).bfloat16()
    chosen = Route(torch.ones(width, 1), torch.zeros(width, 1, dtype=torch.int32))
    on_device = prepare_experts(*(t.to(device) for t in weights[:4]))
    got = moe_mxfp4(x.to(device), on_device, moved(chosen, device), 1e30, None)
    h = got.new_tensor(6.0).float().sigmoid().mul(6).bfloat16().double().cpu()
    want = (weights.dense2[0].t() * h).bfloat16()
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("kind", ["plain", "bias", "hash"])
def test_route(device, kind):
    g = generator(4)
    logits = torch.randn(50, 256, generator=g) * 2
    logits[0], logits[1, 7:20] = 0.0, 3.0  # ties
    ids = torch.randint(0, 100, (50,), generator=g)
    ids[3] = -1
    bias = torch.randn(256, generator=g) * 0.01 if kind == "bias" else None
    table = torch.randint(0, 256, (100, 6), generator=g).int() if kind == "hash" else None
    arguments = [None if t is None else t.to(device) for t in (logits, bias, table, ids)]
    got, want = route(*arguments, 6, 1.5), reference.route(logits, bias, table, ids, 6, 1.5)
    assert torch.equal(got.experts.cpu(), want.experts)
    torch.testing.assert_close(got.weights.cpu(), want.weights, rtol=3e-6, atol=0)


def test_the_reference_on_a_gpu(device, experts, monkeypatch):
    """`DSPARK_KERNELS=reference` from the start, which clears or blames the kernels."""
    monkeypatch.setenv("DSPARK_KERNELS", "reference")
    on_gpu = prepare_experts(*(t.to(device) for t in experts[:4]))
    x, chosen = random_rows(6, HIDDEN), random_route(6, EXPERTS, TOPK)
    got = moe_mxfp4(x.to(device), on_gpu, moved(chosen, device), LIMIT, None)
    assert_close(got, reference.moe_mxfp4(x, experts, chosen, LIMIT, None))


def test_sorted_tiles_match_the_cpu(device):
    chosen = torch.randint(-1, 16, (3000,), generator=generator(6)).int()
    for got, want in zip(
        kernel.sorted_tiles(chosen.to(device), 16, 64),
        kernel.sorted_tiles(chosen, 16, 64),
        strict=True,
    ):
        assert torch.equal(got.cpu(), want)


def test_graph_replay(device, on_gpu):
    """Captured once, replayed on other rows, experts and padding."""
    x, chosen = random_rows(8, HIDDEN).to(device), moved(random_route(8, EXPERTS, TOPK), device)
    moe_mxfp4(x, on_gpu, chosen, LIMIT, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moe_mxfp4(x, on_gpu, chosen, LIMIT, None)
    for seed in range(5):
        fresh = moved(random_route(8, EXPERTS, TOPK, seed=seed), device)
        fresh.experts[seed + 1 :], fresh.weights[seed + 1 :] = -1, 0.0
        x.copy_(random_rows(8, HIDDEN, seed=seed))
        x[seed + 1 :] = float("nan")
        chosen.experts.copy_(fresh.experts)
        chosen.weights.copy_(fresh.weights)
        graph.replay()
        assert torch.equal(y, moe_mxfp4(x, on_gpu, fresh, LIMIT, None))
        assert not y.isnan().any()
