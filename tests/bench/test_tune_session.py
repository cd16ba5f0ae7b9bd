"""A tuning session with an invented kernel and invented times: what it may and may not conclude."""

import json
from types import SimpleNamespace

import pytest
import torch

from dspark.bench.tune import records, session, timing
from dspark.bench.tune import statistics as st
from dspark.bench.tune.cli import OPS as MODULES
from dspark.bench.tune.op import Case, Check, TunedOp, config_id, configured, grid, ops_of
from dspark.bench.tune.parity import compare, parity_interpreted, same_bits
from dspark.bench.tune.resources import Fit, entries_of, with_config
from dspark.bench.tune.runner import choose, parse, run_module
from dspark.kernels.common import launch_table
from dspark.kernels.common.launch_table import LaunchConfig
from dspark.kernels.schedule import kernel as schedule_kernel

PROGRAM = "dspark.bench.tune.dspark_schedule"
INCUMBENT = LaunchConfig(1, 1, {"BLOCK_R": 32})
FAST, SLOW, WRONG, FAT = (LaunchConfig(w, 1, {"BLOCK_R": 32}) for w in (2, 4, 8, 16))
CASES = ("small", "large")


def launch_of(device, copies):
    """Its output shows which configuration ran: WRONG gives other bits."""
    warps = schedule_kernel.LAUNCH["schedule"].num_warps
    return lambda copy: torch.tensor([1.0 + (warps == WRONG.num_warps)])


def invented_op():
    def launch(device):
        return launch_of(device, 1)(0)

    check = Check("tiny", launch, lambda: torch.tensor([1.0]), tolerance=2.0)
    cases = [Case(name, launch_of, 1) for name in CASES]
    candidates = [FAST, SLOW, WRONG, FAT]
    return TunedOp("schedule", "schedule", lambda _: cases, candidates, [check], "x")


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """Function (speed by warps, ...) -> (status, session record). No GPU, no compiler."""
    monkeypatch.setattr(st, "RESAMPLES", 300)
    monkeypatch.setattr(timing, "busy_clock", lambda *_: None)
    monkeypatch.setattr(session, "describe_environment", lambda device: {"gpu": "test", "sm": 89})

    def fits(op, configs):
        problem = "needs 200000 B of shared memory"
        return {config_id(c): Fit(0, 32, 0, problem if c == FAT else None) for c in configs}

    monkeypatch.setattr(session, "fits", fits)

    def run(speed, confirmed=True, noise=0.01, folder="out", options=(), drift=0.0):
        def graph(op, config, case, device):
            with configured(op, config):
                return SimpleNamespace(config=config, output=case.build(device, 1)(0))

        def builds(op, incumbent, candidate, case, device):
            for _ in range(timing.BUILDS):
                yield tuple(graph(op, config, case, device) for config in (incumbent, candidate))

        def sample_pairs(a, b, pairs, *_):
            gain = speed.get(b.config.num_warps, 1.0)
            for pair, order in pairs:
                ms = 10 * (1 + noise) ** (1 if pair % 2 else -1)
                yield timing.Sample(pair, order, 100, ms * (1 + drift), 10 / gain)

        monkeypatch.setattr(timing, "builds", builds)
        monkeypatch.setattr(timing, "sample_pairs", sample_pairs)
        argv = ["--output", str(tmp_path / folder), "--iters", "10", "--device", "cpu"]
        made = session.Session(PROGRAM, invented_op(), parse(PROGRAM, [*argv, *options]))
        monkeypatch.setattr(made, "confirm", lambda winner: confirmed)
        status = session.run(made)
        return status, json.loads((tmp_path / folder / "session.json").read_text())

    return run


def by_id(record):
    return {c["id"]: c for c in record["candidates"]}


def test_a_confirmed_winner_is_written_and_loadable(tune, tmp_path, monkeypatch):
    status, record = tune({2: 1.06, 4: 0.9})
    assert (status, record["status"], record["winner"]) == ("winner", "winner", config_id(FAST))
    found = by_id(record)
    assert found["control"]["geomean"] == pytest.approx(1.0, abs=0.02)
    assert found[config_id(FAST)]["pass"]
    assert not found[config_id(SLOW)]["pass"]
    assert found[config_id(WRONG)]["parity"] == "tolerance"
    assert "other bits" in found[config_id(WRONG)]["reject_reason"]
    assert "200000 B" in found[config_id(FAT)]["reject_reason"]
    assert found[config_id(FAT)]["parity"] is None
    monkeypatch.setattr(schedule_kernel, "LAUNCH", dict(schedule_kernel.LAUNCH))
    assert launch_table.load_winner(tmp_path / "out" / "winner.json", sm=89)
    assert schedule_kernel.LAUNCH["schedule"] == FAST


def test_every_figure_can_be_recomputed_from_the_raw_samples(tune, tmp_path):
    _, record = tune({2: 1.06})
    samples = records.read_samples(tmp_path / "out" / "pairs.jsonl")
    assert set(samples) == {"control", config_id(FAST), config_id(SLOW)}
    again = st.compare(
        {
            case: [st.log_ratio(s.ms_a, s.ms_b) for s in taken]
            for case, taken in samples[config_id(FAST)].items()
        },
        record["seed"],
    )
    stored = by_id(record)[config_id(FAST)]
    assert stored["geomean"] == pytest.approx(again.geomean)
    assert stored["ci95_low"] == pytest.approx(again.ci_low)
    assert {c["case"]: c["n_pairs"] for c in stored["per_case"]} == dict.fromkeys(CASES, 10)
    orders = [s.order for s in samples["control"]["small"]]
    assert sorted(orders) == ["AB"] * 5 + ["BA"] * 5


def test_without_a_gain_the_incumbent_stays(tune, tmp_path):
    status, record = tune({2: 1.005, 4: 0.9})
    assert (status, record["winner"]) == ("no_improvement", None)
    assert not (tmp_path / "out" / "winner.json").exists()


def test_a_winner_that_is_not_confirmed_is_none(tune, tmp_path):
    status, record = tune({2: 1.06}, confirmed=False)
    assert status == "no_improvement"
    assert "not confirmed" in record["note"]
    assert not (tmp_path / "out" / "winner.json").exists()


def test_a_control_with_a_difference_invalidates_the_session(tune):
    status, record = tune({2: 1.2}, noise=0.0001, drift=0.01)
    assert (status, record["winner"]) == ("invalid_noise", None)


def test_a_session_is_continued_not_repeated(tune, tmp_path):
    tune({2: 1.06})
    file = tmp_path / "out" / "pairs.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:-3]) + '\n{"cand": "w4')  # a crash in the last case
    before = records.read_samples(file)["control"]
    status, _ = tune({2: 1.06}, options=["--resume"])
    assert status == "winner"
    assert records.read_samples(file)["control"] == before
    assert len(file.read_text().splitlines()) == len(lines)


def test_folders_of_other_sessions_are_refused(tune, tmp_path):
    tune({})
    with pytest.raises(records.OutputError, match="not empty"):
        tune({})
    with pytest.raises(records.OutputError, match="another seed"):
        tune({}, options=["--resume", "--seed", "1"])


def test_an_incumbent_that_misses_the_reference_is_an_error(tune, tmp_path, monkeypatch):
    bad = {**schedule_kernel.LAUNCH, "schedule": WRONG}
    monkeypatch.setattr(schedule_kernel, "LAUNCH", bad)
    op = invented_op()
    strict = op._replace(checks=[op.checks[0]._replace(tolerance=0.0)])
    monkeypatch.setitem(globals(), "invented_op", lambda: strict)
    with pytest.raises(RuntimeError, match="incumbent fails its own check"):
        tune({})
    assert json.loads((tmp_path / "out" / "session.json").read_text())["status"] == "error"


def test_bits_are_compared_not_values():
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([1.0]), torch.tensor([1.0]).double())


def test_parity_separates_wrong_from_merely_different():
    check = Check("c", None, lambda: torch.tensor([1.0, 2.0]), tolerance=0.01)
    op = invented_op()._replace(checks=[check])
    incumbent = {"c": torch.tensor([1.0, 2.0])}
    assert compare(op, incumbent, incumbent).parity == "exact"
    assert compare(op, incumbent, {"c": torch.tensor([1.0, 2.001])}).parity == "tolerance"
    for wrong in ([1.0, 2.5], [1.0, float("nan")]):
        assert compare(op, incumbent, {"c": torch.tensor(wrong)}).parity == "failed"


@pytest.mark.parametrize("module", MODULES)
def test_every_op_names_what_the_compiler_check_covers(module):
    for op in ops_of(f"dspark.bench.tune.{module}"):
        incumbent = op.incumbent()
        for entry in entries_of(op):
            assert (entry.num_warps, entry.num_stages) == incumbent[:2], entry.name
        for config in op.candidates:
            assert config.constexprs.keys() == incumbent.constexprs.keys()
        assert len({config_id(c) for c in op.candidates}) == len(op.candidates)
        names = [case.name for case in op.cases("representative")]
        assert len(set(names)) == len(names) >= 3


def test_candidates_change_an_entry_and_nothing_else():
    (entry, *_) = entries_of(ops_of(PROGRAM)[0])
    changed = with_config(entry, LaunchConfig(4, 1, {"BLOCK_R": 8}))
    assert (changed.num_warps, changed.constexprs["BLOCK_R"]) == (4, 8)
    assert changed.constexprs["COLUMNS"] == entry.constexprs["COLUMNS"]
    assert changed.signature == entry.signature


def test_the_interpreter_clears_the_schedule_candidates():
    op = ops_of(PROGRAM)[0]
    configs = grid([1], [1], BLOCK_R=[8, 64])
    found = parity_interpreted(PROGRAM, op, configs)
    assert {name: parity.parity for name, parity in found.items()} == {
        config_id(config): "exact" for config in configs
    }


def test_arguments(capsys, tmp_path):
    documented = (
        "--source . --output out --case-set representative --warmup 4 --iters 20 "
        "--timing-min-ms 10 --timing-max-ms 30"
    )
    options = parse(PROGRAM, documented.split())
    assert (options.iters, options.timing_max_ms, options.seed) == (20, 30.0, 20260811)
    assert run_module(PROGRAM, ["--list"]) == 0
    assert "schedule.schedule, incumbent w1-s1-BLOCK_R32" in capsys.readouterr().out
    assert run_module(PROGRAM, ["--output", str(tmp_path / "o"), "--op", "sort"]) == 2
    assert "no op 'sort'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="choose from"):
        choose(ops_of(PROGRAM), "x")
