"""`dspark profile-steps`: step times by rows from runs of two lengths."""

import pytest

from dspark.commands import profile_steps
from dspark.speculation import step_cost


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
