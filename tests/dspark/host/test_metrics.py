"""Counters of drafts, as `/metrics` shows them."""

from types import SimpleNamespace

from prometheus_client import CollectorRegistry

from dspark.host.metrics import DraftCounters, counters_of


def test_steps_rows_and_positions_are_counted():
    registry = CollectorRegistry()
    counters = DraftCounters(3, "flash", registry)
    counters.record([0, 3, 1], [4, 4, 2])
    counters.record([2], [3])
    counters.record([], [])

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "flash", **labels})

    assert value("dspark:verify_steps_total") == 4
    assert value("dspark:verify_rows_total") == 13
    assert [
        value("dspark:drafts_accepted_total", position=position) for position in "1234"
    ] == [3, 2, 1, None]  # fmt: skip


def test_a_position_that_no_draft_reached_is_zero():
    registry = CollectorRegistry()
    DraftCounters(2, "flash", registry)
    labels = {"model_name": "flash", "position": "2"}
    assert registry.get_sample_value("dspark:drafts_accepted_total", labels) == 0


def test_nobody_counts_unasked_and_only_the_first_rank_does():
    asked = SimpleNamespace(enable_metrics=True, served_model_name="flash")
    assert counters_of(asked, 1, 5) is None
    assert counters_of(SimpleNamespace(enable_metrics=False), 0, 5) is None
