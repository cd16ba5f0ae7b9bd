"""Throughput statistics against values computed by hand."""

import pytest

from dspark.bench import throughput as tp
from dspark.bench.client import Step, Trace


def trace(start, steps, end=None, verify_steps=None, accepted=()):
    steps = [Step(*step) for step in steps]
    return Trace(start, steps, end or steps[-1].at, None, verify_steps, list(accepted))


# Two clients released at 10.0. Their common decoding lasts from 12.0 to 16.0.
EARLY = trace(10.0, [(11.0, 1), (12.0, 3), (14.0, 6), (16.0, 8)], verify_steps=3)
LATE = trace(10.0, [(12.0, 1), (13.0, 2), (16.0, 5), (20.0, 8)], 20.5, verify_steps=4)


def test_decode_window_counts_tokens_while_all_decode():
    # EARLY has 3 tokens at 12.0 and 8 at 16.0; LATE 1 and 5.
    assert tp.decode_window([EARLY, LATE]) == (5 + 4, 4.0)


def test_there_is_no_window_when_one_finishes_before_another_starts():
    late = trace(10.0, [(17.0, 1), (18.0, 2)])
    assert tp.decode_window([EARLY, late]) is None
    assert tp.summarise([EARLY, late], 10.0, []).decode_window is None


def test_end_to_end_counts_everything_from_release_to_last_finish():
    assert tp.end_to_end([EARLY, LATE], release=9.5) == (16, 11.0)


def test_summary_of_two_requests():
    figures = tp.summarise([EARLY, LATE], 9.5, [3.0, 1.0, 2.0])
    assert figures.scheduler_output == 2.0
    assert figures.decode_window == 9 / 4.0
    assert figures.end_to_end == 16 / 11.0
    # 7 tokens after the first each; seven verify steps in all.
    assert figures.accepted_length == 14 / 7
    # EARLY: 5 s over 3 steps, LATE: 8 s over 4.
    assert figures.step_time == pytest.approx((5 / 3 + 2.0) / 2)
    assert figures.ttft == pytest.approx({"p50": 1.5, "p90": 1.9, "p99": 1.99})


def test_a_step_of_several_tokens_is_shared_between_them():
    assert tp.inter_token_times(EARLY) == pytest.approx([0.5, 0.5, 2 / 3, 2 / 3, 2 / 3, 1.0, 1.0])


def test_without_server_figures_they_stay_unknown():
    plain = trace(0.0, [(1.0, 1), (2.0, 2), (4.0, 3)])
    figures = tp.summarise([plain], 0.0, [])
    assert figures.scheduler_output is None
    assert figures.accepted_length is None
    assert figures.acceptance_by_position == []
    assert figures.step_time == 1.5  # two steps of the stream


def test_acceptance_by_position_adds_requests():
    # Steps that accepted 0, 1, 2 drafts: 4, 3, 1 and 0, 1, 1.
    traces = [trace(0, [(1, 1)], accepted=[4, 3, 1]), trace(0, [(1, 1)], accepted=[0, 1, 1])]
    assert tp.acceptance_by_position(traces) == [6 / 10, 2 / 10]


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([5.0], 0.99, 5.0), ([1.0, 2.0, 3.0, 4.0], 0.5, 2.5), ([4.0, 1.0, 2.0], 0.0, 1.0),
     ([0.0, 10.0], 0.9, 9.0)],
)  # fmt: skip
def test_percentile(values, share, expected):
    assert tp.percentile(values, share) == pytest.approx(expected)


def test_percentile_needs_values():
    with pytest.raises(ValueError, match="no values"):
        tp.percentile([], 0.5)


def test_scaling_is_a_share_of_linear():
    single = tp.summarise([EARLY], 10.0, [4.0])
    both = tp.summarise([EARLY, LATE], 10.0, [])
    shares = tp.scaling(both, single)
    assert shares["scheduler_output"] is None
    assert shares["end_to_end"] == pytest.approx((16 / 10.5) / (2 * (8 / 6.0)))
    assert tp.scaling(single, single)["decode_window"] == 1.0
    assert tp.scaling(both, None) == dict.fromkeys(tp.THROUGHPUTS)
