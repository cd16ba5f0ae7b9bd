"""`dspark profile-steps`: step times by requests and rows, from runs of two lengths."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from dspark.commands import profile_steps
from dspark.speculation import step_cost

DEPTH = 5


def test_step_times_are_differences_of_a_short_and_a_long_run():
    """A step takes 8 ms, 2 ms a request, 1 ms a row and 4 ms for a draft; a batch begins in 3 s."""
    now, share, order = 0.0, 1.0, []

    def run(requests, steps, drafts):
        nonlocal now
        rows = requests + drafts * round(share * requests * DEPTH)
        now += 3 + steps * (0.008 + 0.002 * requests + 0.001 * rows + 0.004 * drafts)
        order.append(requests)
        return rows

    def set_share(value):
        nonlocal share
        share = value

    samples = profile_steps.measure(run, set_share, [1, 4], 16, 3, clock=lambda: now)
    assert order == ([1] * 14 + [4] * 14) * 3  # all sizes before any repeat
    for requests, rows, seconds, drafted in samples:
        assert seconds == pytest.approx(0.008 + 0.002 * requests + 0.001 * rows + 0.004 * drafted)
    one, four = step_cost.from_samples(samples)
    assert (one.without_draft, four.without_draft) == pytest.approx((0.011, 0.020))
    assert one.rows == (1, 2, 3, 4, 5, 6)
    assert four.rows == (4, 8, 12, 16, 20, 24)


def test_rows_that_really_ran_count_and_noise_that_hides_a_step_does_not():
    """Drafts without a chance are not verified, whatever the budget; one long run was too short."""
    times = iter([0, 1, 2.5, 10, 11, 11.5] * 7)
    samples = profile_steps.measure(
        lambda *_: 3.6, lambda _: None, [2], 10, 2, clock=lambda: next(times)
    )
    assert {(s.requests, s.rows) for s in samples} == {(2, 4)}
    assert [s.seconds for s in samples] == pytest.approx([0.05] * 7)


def test_processor_time_is_that_of_all_processes_of_the_server():
    """Two processes that count for 0.3 s of their own processor time, and then wait."""
    busy = "import time\nwhile time.process_time() < 0.3: pass\n"
    wait = "print('done', flush=True); input()"
    child = f"subprocess.Popen([sys.executable, '-c', {busy + wait!r}], stdin=sys.stdin)"
    parent = f"import subprocess, sys\n{child}\n{busy}{wait}"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert [process.stdout.readline(), process.stdout.readline()] == [b"done\n"] * 2
        used = profile_steps.processor_seconds(SimpleNamespace(process=process))
        process.communicate(b"\n\n")
    assert used > 0.5  # the parent alone stays far below
