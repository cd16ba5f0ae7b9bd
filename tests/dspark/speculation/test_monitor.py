"""What the host learns of acceptance, and what it reserves for steps it has not seen yet."""

import logging

import pytest

from dspark.host.draft_input import reserved_length
from dspark.speculation.monitor import STUCK_STEPS, AcceptanceMonitor

PAGE, LIMIT, ROWS = 256, 2048, 6


def verified(monitor: AcceptanceMonitor, accepted: list[int]) -> None:
    """A step that verified every draft."""
    monitor.record(accepted, [monitor.depth + 1] * len(accepted))


def test_acceptance_is_counted_by_position():
    monitor = AcceptanceMonitor(depth=3)
    verified(monitor, [0, 3, 1])
    verified(monitor, [2])
    report = monitor.report()
    assert report["verify_steps"] == 4
    assert report["mean_accepted_length"] == 1 + 6 / 4
    assert report["acceptance_per_position"] == [3 / 4, 2 / 4, 1 / 4]


def test_rows_are_counted_as_run_or_saved():
    monitor = AcceptanceMonitor(depth=3)
    monitor.record([0, 3, 1], [1, 4, 3])
    report = monitor.report()
    assert (report["verify_rows_run"], report["verify_rows_saved"]) == (8, 4)


def test_drafts_that_nobody_verified_are_not_stuck(caplog):
    monitor = AcceptanceMonitor(depth=5)
    for _ in range(3 * STUCK_STEPS):
        monitor.record([0, 0], [1, 1])
    assert monitor.report()["warning"] is None
    for _ in range(STUCK_STEPS):
        monitor.record([0, 0], [1, 2])  # the second's first draft was tried
    assert "no draft" in monitor.report()["warning"]


def test_nothing_yet_is_not_zero():
    assert AcceptanceMonitor(2).report()["mean_accepted_length"] is None


@pytest.mark.parametrize(("stuck", "said"), [(0, "no draft"), (5, "all 5 drafts")])
def test_a_warning_after_200_steps_at_either_end(caplog, stuck, said):
    monitor = AcceptanceMonitor(depth=5)
    with caplog.at_level(logging.WARNING):
        for _ in range(STUCK_STEPS - 1):
            verified(monitor, [stuck, stuck])
        assert monitor.report()["warning"] is None
        assert not caplog.records
        for _ in range(3):
            verified(monitor, [stuck])
    assert said in monitor.report()["warning"]
    assert len(caplog.records) == 1  # said once, not in every step
    verified(monitor, [2])
    assert monitor.report()["warning"] is None
    assert monitor.report()["stuck_steps"] == 0


def test_changing_or_mixed_acceptance_is_not_stuck():
    monitor = AcceptanceMonitor(depth=5)
    for step in range(3 * STUCK_STEPS):
        verified(monitor, [0, 5] if step % 2 else [5 * (step // 100 % 2)])
    assert monitor.report()["warning"] is None


def test_a_step_of_finished_requests_says_nothing():
    monitor = AcceptanceMonitor(depth=5)
    for _ in range(STUCK_STEPS):
        verified(monitor, [5])
        verified(monitor, [])
    assert monitor.steps == STUCK_STEPS
    assert "all 5 drafts" in monitor.report()["warning"]


def test_steady_acceptance_between_the_ends_is_not_stuck():
    monitor = AcceptanceMonitor(depth=5)
    for _ in range(2 * STUCK_STEPS):
        verified(monitor, [3])
    assert monitor.report()["warning"] is None


@pytest.mark.parametrize("committed", [1, 5, 243, 244, 245, 255, 256, 257, 500, 2030, 2047])
@pytest.mark.parametrize("owned_pages", [0, 1, 2])
def test_the_next_two_steps_always_fit(committed, owned_pages):
    """The step in flight and the one after it, whatever they commit; whole pages; bounded."""
    allocated = min(-(-committed // PAGE) + owned_pages, LIMIT // PAGE) * PAGE
    reserved = reserved_length(committed, allocated, 2 * ROWS, PAGE, LIMIT)
    assert reserved >= min(committed + 2 * ROWS, LIMIT)
    assert reserved % PAGE == 0
    assert allocated <= reserved <= LIMIT
    assert reserved < committed + 2 * ROWS + PAGE or reserved == allocated
