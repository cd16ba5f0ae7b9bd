"""Verify budgets and rows, cost tables and confidence calibration."""

import itertools
import json

import pytest
import torch

from dspark.commands import fit_confidence, profile_steps
from dspark.errors import UsageError
from dspark.kernels.schedule.reference import survival
from dspark.speculation import calibration, step_cost
from dspark.speculation.budget import Mode, VerifyScheduler, best_budget
from dspark.speculation.settings import Settings


def scheduler(mode=Mode.SCHEDULED, depth=5, rate=None):
    return VerifyScheduler(mode, gamma=5, depth=depth, slots=9, rate=rate, device="cpu")


def confidence(requests, seed=0):
    return torch.rand(requests, 5, generator=torch.Generator().manual_seed(seed))


def slots(requests):
    return torch.arange(1, requests + 1)


# The budget.


@pytest.mark.parametrize("seed", range(20))
def test_budget_is_the_best_of_all_budgets(seed):
    """Against trying every K."""
    generator = torch.Generator().manual_seed(seed)
    requests = seed % 4 + 1
    chance = survival(torch.rand(requests, 5, generator=generator))
    seconds = torch.rand(40, generator=generator, dtype=torch.float64).sort().values + 0.05
    rate = 1 / seconds
    ranked = sorted(chance.double().flatten().tolist(), reverse=True)
    speed = [
        (requests + sum(ranked[:k])) * float(rate[requests + k]) for k in range(requests * 5 + 1)
    ]
    chosen = int(best_budget(chance, rate))
    assert speed[chosen] == pytest.approx(max(speed), rel=1e-12)


def test_free_rows_are_all_verified_and_dear_ones_are_not():
    chance = torch.full((2, 5), 0.5)
    assert int(best_budget(chance, torch.ones(20, dtype=torch.float64))) == 10
    dear = 1 / torch.arange(1, 21, dtype=torch.float64)
    assert int(best_budget(chance * 0.1, dear)) == 0


def test_budget_ignores_the_confidences_of_the_drafts_it_decides_about():
    """Non-anticipation: this step's confidences share out the budget, they do not set it."""
    rate = torch.cat([torch.ones(4), torch.full((8,), 0.6), torch.full((8,), 0.1)]).double()
    totals = set()
    for seed in range(5):
        made = scheduler(rate=rate)
        made.rows(torch.full((2, 5), 0.8), slots(2))  # remembered for the next step
        totals.add(int(made.rows(confidence(2, seed).clamp(min=0.3), slots(2)).acceptable.sum()))
    assert len(totals) == 1


def test_a_new_owner_of_a_slot_starts_with_full_trust():
    made = scheduler(rate=torch.ones(64).double())
    made.rows(torch.zeros(2, 5), slots(2))
    made.admit(torch.tensor([2]))
    assert made.remembered[1].tolist() == [0.0] * 5
    assert made.remembered[2].tolist() == [1.0] * 5


# The rows.


def test_nothing_known_about_costs_means_everything_is_verified():
    for mode in Mode:
        rows = scheduler(mode).rows(confidence(3), slots(3))
        assert rows.run.tolist() == rows.acceptable.tolist() == [6, 6, 6]


@pytest.mark.parametrize("budget", [0, 1, 4, 14, 15, 99])
@pytest.mark.parametrize("depth", [1, 3, 5])
def test_a_fixed_budget_is_spent_on_the_likeliest_drafts(budget, depth):
    made = scheduler(depth=depth)
    made.forced_rows = budget
    trust = confidence(3, seed=budget).clamp(min=0.05)
    rows = made.rows(trust, slots(3))
    ranked = sorted(
        itertools.product(range(depth), range(3)),
        key=lambda at: (-float(survival(trust)[at[1], at[0]]), *at),
    )
    expected = [1, 1, 1]
    for _, request in ranked[:budget]:
        expected[request] += 1
    assert rows.run.tolist() == rows.acceptable.tolist() == expected


def test_cap_accept_runs_every_row_and_accepts_what_the_budget_admits():
    made = scheduler(Mode.CAP_ACCEPT)
    made.forced_rows = 2
    rows = made.rows(confidence(2), slots(2))
    assert rows.run.tolist() == [6, 6]
    assert int(rows.acceptable.sum()) == 2 + 2


def test_static_mode_takes_no_budget():
    made = scheduler(Mode.STATIC)
    made.forced_rows = 0
    assert made.rows(confidence(2), slots(2)).run.tolist() == [6, 6]


# Cost tables.


def test_cost_table_takes_medians_and_never_gets_faster_with_more_rows():
    cost = step_cost.from_samples({2: [0.1, 0.1, 9.0], 8: [0.05, 0.08, 0.07], 4: [0.2]})
    assert cost.rows == (2, 4, 8)
    assert cost.steps_per_second == pytest.approx((10.0, 5.0, 5.0))


def test_cost_table_survives_the_file_and_clamps_at_both_ends(tmp_path):
    cost = step_cost.StepCost((2, 4), (10.0, 5.0), 6)
    step_cost.save(cost, tmp_path / "cost.json")
    assert step_cost.load(tmp_path / "cost.json") == cost
    assert step_cost.rate_table(cost).tolist() == [10, 10, 10, 10, 5, 5, 5]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"sample_batch_tokens": [4, 2]}, "strictly increase"),
        ({"sample_steps_per_sec": [5.0, 10.0]}, "never increase"),
        ({"sample_steps_per_sec": [5.0]}, "one step rate for each"),
        ({"max_batch_tokens": 3}, "below the largest sample"),
        ({"sample_steps_per_sec": [5.0, 0.0]}, "must be positive"),
        ({"sample_batch_tokens": "many"}, "not a step cost table"),
    ],
)
def test_a_bad_cost_table_is_named_in_one_sentence(tmp_path, change, complaint):
    good = {
        "sample_batch_tokens": [2, 4],
        "sample_steps_per_sec": [10.0, 5.0],
        "max_batch_tokens": 4,
    }
    (tmp_path / "cost.json").write_text(json.dumps(good | change))
    with pytest.raises(step_cost.TableError, match=complaint):
        step_cost.load(tmp_path / "cost.json")


def test_no_samples_make_no_table():
    with pytest.raises(step_cost.TableError):
        step_cost.from_samples({4: []})


# Calibration.


def overconfident(blocks=4000, temperature=2.5):
    """Blocks whose true acceptance chance is sigmoid(z / temperature)."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(blocks, 5, generator=generator) * 2 + 2
    happens = torch.rand(blocks, 5, generator=generator) < torch.sigmoid(z / temperature)
    return z, happens.int().cumprod(1).sum(1)


def test_calibration_finds_the_temperature_and_lowers_the_error():
    fitted = calibration.fit(*overconfident(), "synthetic")
    assert fitted.num_samples == 4000
    assert all(1.6 < t < 4.0 for t in fitted.temperatures[:3])
    assert all(a <= b for a, b in zip(fitted.ece_after, fitted.ece_before, strict=True))
    assert fitted.ece_after[0] < 0.5 * fitted.ece_before[0]


def test_calibrated_confidences_keep_their_temperature_of_one():
    fitted = calibration.fit(*overconfident(temperature=1.0), "synthetic")
    assert all(0.7 < t < 1.5 for t in fitted.temperatures[:3])


def test_calibration_error_by_hand():
    predicted = torch.tensor([0.01, 0.02, 0.99, 0.98], dtype=torch.float64)
    happened = torch.tensor([False, True, True, True])
    assert calibration.expected_calibration_error(predicted, happened) == pytest.approx(
        (abs(0.03 - 1) + abs(1.97 - 2)) / 4
    )


def test_calibration_survives_the_file_and_is_checked(tmp_path):
    fitted = calibration.fit(*overconfident(200), "synthetic")
    calibration.save(fitted, tmp_path / "calibration.json")
    assert calibration.load(tmp_path / "calibration.json", gamma=5) == fitted
    with pytest.raises(step_cost.TableError, match="calibrates 5 draft positions"):
        calibration.load(tmp_path / "calibration.json", gamma=4)
    broken = json.loads((tmp_path / "calibration.json").read_text()) | {
        "temperatures": [1, 1, 0, 1, 1]
    }
    (tmp_path / "calibration.json").write_text(json.dumps(broken))
    with pytest.raises(step_cost.TableError, match="not positive"):
        calibration.load(tmp_path / "calibration.json", gamma=5)


def test_samples_are_read_as_they_were_written(tmp_path):
    file = calibration.SampleFile(tmp_path / "samples.jsonl")
    file.add(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([2, 0]))
    file.add(torch.tensor([[5.0, 6.0]]), torch.tensor([1]))
    logits, accepted = calibration.read_samples(tmp_path / "samples.jsonl")
    assert logits.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert accepted.tolist() == [2, 0, 1]


# Settings.


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("DSPARK_VERIFY", "sometimes", "static, scheduled, cap-accept"),
        ("DSPARK_STEP_COST", "/nowhere.json", "DSPARK_STEP_COST: Cannot read"),
        ("DSPARK_CALIBRATION", "/nowhere.json", "DSPARK_CALIBRATION: Cannot read"),
        ("DSPARK_VERIFY_BUDGET", "-3", "must be a number of draft rows"),
    ],
)
def test_a_bad_setting_is_one_sentence(monkeypatch, name, value, complaint):
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=complaint):
        Settings.from_environment(gamma=5)


@pytest.mark.parametrize("mode", ["scheduled", "cap-accept"])
def test_samples_are_refused_where_not_every_draft_is_verified(monkeypatch, tmp_path, mode):
    """Drafts are dropped by confidence, so the outcomes that remain would say too much of it."""
    monkeypatch.setenv("DSPARK_SAMPLES", str(tmp_path / "samples.jsonl"))
    monkeypatch.setenv("DSPARK_VERIFY", mode)
    with pytest.raises(UsageError, match=f"DSPARK_SAMPLES collects .* with DSPARK_VERIFY={mode}:"):
        Settings.from_environment(gamma=5)
    monkeypatch.setenv("DSPARK_VERIFY", "static")
    assert Settings.from_environment(gamma=5).samples is not None


def test_settings_reach_the_scheduler(monkeypatch, tmp_path):
    step_cost.save(step_cost.StepCost((1,), (2.0,), 8), tmp_path / "cost.json")
    monkeypatch.setenv("DSPARK_VERIFY", "cap-accept")
    monkeypatch.setenv("DSPARK_STEP_COST", str(tmp_path / "cost.json"))
    monkeypatch.setenv("DSPARK_VERIFY_BUDGET", "3")
    made = Settings.from_environment(gamma=5).scheduler(depth=5, slots=4, device="cpu")
    assert made.mode is Mode.CAP_ACCEPT
    assert made.rate.tolist() == [2.0] * 9
    assert made.forced_rows == 3


# Commands.


def test_fit_confidence_writes_a_calibration(tmp_path, capsys):
    z, accepted = overconfident(500)
    calibration.SampleFile(tmp_path / "samples.jsonl").add(z, accepted)
    done = fit_confidence.main(
        [str(tmp_path / "samples.jsonl"), str(tmp_path / "calibration.json")]
    )
    assert done == 0
    assert calibration.load(tmp_path / "calibration.json", gamma=5).num_samples == 500
    assert "500 blocks" in capsys.readouterr().out


def test_fit_confidence_names_a_missing_file(tmp_path, capsys):
    assert fit_confidence.main([str(tmp_path / "none"), str(tmp_path / "calibration.json")]) == 1
    assert "Cannot read" in capsys.readouterr().err


def test_step_times_are_differences_of_a_short_and_a_long_run():
    """A machine whose step takes 10 ms plus 1 ms a row, and whose batches cost 3 s to begin."""
    now, share = 0.0, 1.0

    def run(requests, steps):
        nonlocal now
        rows = profile_steps.rows_verified(requests, share, depth=5)
        now += 3 + steps * (0.010 + 0.001 * rows)

    def set_share(value):
        nonlocal share
        share = value

    seconds = profile_steps.measure(run, set_share, [1, 4], 5, 16, 3, clock=lambda: now)
    assert sorted(seconds) == [1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 24]
    for rows, times in seconds.items():
        assert times == pytest.approx([0.010 + 0.001 * rows] * len(times))
    cost = step_cost.from_samples(seconds)
    assert cost.steps_per_second[0] == pytest.approx(1 / 0.011)
