"""What `proof_ops` says of an op: on toy ops that break a promise, and on every real op on the CPU,
where the op and its reference are the same code."""

import itertools

import pytest
import torch

from dspark.bench import control_ops, proof_ops, step_ops
from dspark.bench.op_case import OpCase
from dspark.bench.proof_ops import CPU, FAMILIES, METHODS, Family, Method, proof_of, prove
from dspark.bench.report import proof_table
from dspark.bench.tune import moe as moe_inputs

ROWS = 6
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Fewer runs, layers, experts and tokens."""
    monkeypatch.setattr(proof_ops, "RUNS", 3)
    monkeypatch.setattr(step_ops, "VOCAB_SHARD", 256)
    monkeypatch.setattr(control_ops, "C128_LAYERS", 1)
    monkeypatch.setattr(moe_inputs, "EXPERTS", 8)
    moe_inputs.rank_experts.cache_clear()
    yield
    moe_inputs.rank_experts.cache_clear()


@pytest.fixture
def figure_of(monkeypatch):
    """Figures of a toy op of x f32 [6, 8], with another function as its reference."""

    def figures(function, reference, by_row: bool = True) -> dict:
        method = Method({"x": 1} if by_row else {}, reference=reference)
        monkeypatch.setitem(METHODS, function, method)
        x = torch.arange(ROWS * 8.0).view(ROWS, 8)
        return prove(proof_of(OpCase("toy", function, [{"x": x}]), ROWS, "row"))

    return figures


def double(x):
    return 2 * x


def test_a_right_op_keeps_every_promise(figure_of):
    figure = figure_of(lambda x: double(x), double)
    assert figure["holds"]
    assert figure["error"] == 0
    assert figure["deterministic"] is figure["invariant"] is True
    assert figure["us"] is None


def test_an_op_without_rows_promises_nothing_of_them(figure_of):
    figure = figure_of(lambda x: double(x), double, by_row=False)
    assert figure["holds"]
    assert figure["invariant"] is None


@pytest.mark.parametrize("wrong", [2.0, 1000.0, torch.nan, -torch.inf])
def test_a_wrong_value(figure_of, wrong):
    def one_wrong(x):
        return double(x).masked_fill(x == 3, 6 + wrong)

    figure = figure_of(one_wrong, double)
    assert not figure["right"]
    assert not figure["holds"]
    assert figure["error"] == (wrong / 94 if 0 < wrong < torch.inf else torch.inf)


def test_infinities_must_stand_where_the_reference_has_them(figure_of):
    def hidden(x):
        return double(x).masked_fill(x > 40, -torch.inf)

    assert figure_of(lambda x: hidden(x), hidden)["holds"]
    assert figure_of(lambda x: double(x), hidden)["error"] == torch.inf


def test_integers_must_be_equal(figure_of):
    figure = figure_of(lambda x: (x + (x == 3)).int(), lambda x: x.int())
    assert (figure["differing"], figure["compared"]) == (1, ROWS * 8)
    assert figure["error"] is None
    assert not figure["right"]


@pytest.mark.parametrize(("steps", "right"), [(0, True), (1, True), (2, False)])
def test_an_fp8_code_may_be_one_step_off(figure_of, steps, right):
    def codes(x):
        return x.to(E4M3)

    def moved(x):
        code = codes(x).view(torch.uint8)
        return (code + steps * (x == 3).to(torch.uint8)).view(E4M3)

    figure = figure_of(moved, codes)
    assert figure["right"] == right
    assert figure["differing"] == (steps > 0)


def test_many_fp8_codes_may_not_be_off(figure_of):
    figure = figure_of(
        lambda x: (x.to(E4M3).view(torch.uint8) + 1).view(E4M3), lambda x: x.to(E4M3)
    )
    assert not figure["right"]


def test_an_op_that_differs_from_run_to_run(figure_of):
    calls = itertools.count()

    def restless(x):
        return double(x) + 1e-6 * (next(calls) % 2)

    figure = figure_of(restless, double)
    assert figure["deterministic"] is False
    assert figure["right"]
    assert not figure["holds"]


def test_an_op_whose_rows_feel_their_batch(figure_of):
    def mixing(x):
        return double(x) + 1e-6 * x.shape[0]

    figure = figure_of(mixing, mixing)
    assert figure["invariant"] is False
    assert figure["deterministic"]
    assert not figure["holds"]


def test_an_op_that_fails_keeps_what_was_known(figure_of):
    calls = itertools.count()

    def breaks(x):
        if next(calls):
            raise RuntimeError("out of luck\nand more")
        return double(x)

    figure = figure_of(breaks, double)
    assert figure["problem"] == "RuntimeError: out of luck"
    assert figure["right"]
    assert figure["deterministic"] is None
    assert not figure["holds"]


def test_inputs_that_cannot_be_made_do_not_lose_the_others(monkeypatch):
    def make(size, device):
        if size == 2:
            raise MemoryError("full")
        yield from control_ops.schedule_cases(size, device)

    monkeypatch.setitem(FAMILIES, "schedule", Family(make, (2, 3), "request"))
    first, *others = proof_ops.run_family("schedule", CPU, None)
    assert first["problem"] == "MemoryError: full"
    assert [figure["holds"] for figure in others] == [True] * 3


@pytest.mark.parametrize("name", FAMILIES)
def test_every_op_on_the_cpu(monkeypatch, name):
    size = ROWS if FAMILIES[name].unit == "row" else 2
    monkeypatch.setitem(FAMILIES, name, FAMILIES[name]._replace(sizes=(size,)))
    figures = proof_ops.run_family(name, CPU, None)
    assert figures
    for figure in figures:
        assert figure["holds"], figure


def test_every_method_has_a_family():
    made = {case.function for family in FAMILIES.values() for case in family.make(1, CPU)}
    assert made == set(METHODS)


def test_table_folds_sizes_and_shows_what_is_broken():
    def figure(size: int, **known) -> dict:
        return proof_ops.blank("fp8_linear", "wq_b", size, "row") | known

    good = {"holds": True, "error": 1e-3, "differing": 0, "compared": 8, "right": True,
            "deterministic": True, "invariant": True, "us": 5.0, "gb_per_s": 800.0,
            "share_of_copy_bandwidth": 0.2}  # fmt: skip
    record = {
        "environment": {
            "date": "2026-01-02T03:04:05Z",
            "packages": {"torch": "2.13"},
            "source": {"commit": None},
            "gpus": [{"name": "NVIDIA H200", "driver_version": "1"}],
        },
        "sm89": True,
        "runs": 50,
        "copy_bandwidth": 4e12,
        "figures": [figure(1, **good), figure(6, **good | {"error": 2e-3, "us": 6.0})],
    }
    text = proof_table(record)
    assert "| `fp8_linear`, wq_b; 1, 6 rows | 2.0e-03, equal | yes | yes | 5.0 / 6.0 |" in text
    assert "sm_89 code generation" in text
    assert "in 2 of 2 cases" in text
    record["figures"] += [
        figure(48, **good | {"differing": 3, "right": False, "deterministic": False}),
        figure(64, problem="RuntimeError: x"),
    ]
    text = proof_table(record)
    assert "**RuntimeError: x** | **2.0e-03, 3 of 24 differ** | **no** | yes |" in text
