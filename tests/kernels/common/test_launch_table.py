"""The launch table, and tuned configurations that may replace an entry of it."""

import json

import pytest

from dspark.kernels.common import launch_table
from dspark.kernels.schedule import kernel as schedule_kernel


@pytest.fixture
def winner(tmp_path, monkeypatch):
    """Writes a winner.json with changes and loads it; the launch table is restored afterwards."""
    monkeypatch.setattr(schedule_kernel, "LAUNCH", dict(schedule_kernel.LAUNCH))
    content = {
        "schema": 1,
        "op": "schedule.schedule",
        "sm": 89,
        "source_sha256": launch_table.source_sha256("schedule"),
        "config": {"num_warps": 2, "num_stages": 1, "constexprs": {"BLOCK_R": 64}},
    }

    def load(**changes):
        path = tmp_path / "winner.json"
        path.write_text(json.dumps({**content, **changes}))
        return launch_table.load_winner(path, sm=89)

    return load


def test_a_winner_replaces_its_entry(winner):
    assert winner()
    assert launch_table.configurations()["schedule.schedule"] == launch_table.LaunchConfig(
        2, 1, {"BLOCK_R": 64}
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": 2}, "schema is 2"),
        ({"op": "schedule.sort"}, "no op"),
        ({"op": "sorting.schedule"}, "no op"),
        ({"sm": 90}, "tuned for sm_90"),
        ({"source_sha256": "0" * 64}, "has changed"),
        ({"config": {"num_warps": 1, "num_stages": 1, "constexprs": {}}}, "other constants"),
        ({"config": {"num_warps": 1, "constexprs": {}}}, "consist of num_warps, num_stages"),
        ({"config": None}, "consist of"),
        ({"op": None}, "no op None"),
    ],
)
def test_a_winner_for_something_else_is_ignored_with_the_reason(winner, changes, reason):
    before = launch_table.configurations()
    with pytest.warns(UserWarning, match=reason):
        assert not winner(**changes)
    assert launch_table.configurations() == before
