"""What an operator sets about speculation."""

import pytest

from dspark.errors import UsageError
from dspark.speculation import step_cost
from dspark.speculation.budget import Mode
from dspark.speculation.settings import Settings


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
    cost = (step_cost.Steps(1, (1, 6), (0.5, 0.5)),)
    step_cost.save(cost, tmp_path / "cost.json")
    monkeypatch.setenv("DSPARK_VERIFY", "cap-accept")
    monkeypatch.setenv("DSPARK_STEP_COST", str(tmp_path / "cost.json"))
    monkeypatch.setenv("DSPARK_VERIFY_BUDGET", "3")
    made = Settings.from_environment(gamma=5).scheduler(depth=5, slots=4, device="cpu")
    assert made.mode is Mode.CAP_ACCEPT
    assert made.cost == cost
    assert made.forced_rows == 3


@pytest.mark.parametrize(
    ("variables", "measures"),
    [
        ({}, False),
        ({"DSPARK_VERIFY": "scheduled"}, True),
        ({"DSPARK_VERIFY": "cap-accept"}, True),
        ({"DSPARK_VERIFY": "scheduled", "DSPARK_VERIFY_BUDGET": "0"}, False),
        ({"DSPARK_VERIFY": "scheduled", "DSPARK_FORCED_DRAFTS": "1"}, False),
        ({"DSPARK_VERIFY": "scheduled", "DSPARK_STEP_COST": "cost.json"}, False),
    ],
)
def test_steps_are_measured_where_a_schedule_has_no_table(
    monkeypatch, tmp_path, variables, measures
):
    monkeypatch.chdir(tmp_path)
    step_cost.save((step_cost.Steps(1, (1,), (0.5,)),), "cost.json")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Settings.from_environment(gamma=5).measures_steps == measures
