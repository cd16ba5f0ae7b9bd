"""Ratios with intervals, first differences, and the refusals of the paired bench."""

import math

import pytest

from dspark.bench import exact, pair
from dspark.bench.client import Step, Trace
from dspark.bench.difference import first_differences, first_index
from dspark.bench.interval import paired_ratio
from dspark.bench.load import Load
from dspark.bench.measure import BenchError, Level, check_complete
from dspark.bench.throughput import summarise


def test_geometric_mean_and_t_interval_by_hand():
    # Log ratios ln 2, ln 2, ln 2 +- 0.1: mean ln 2, standard deviation 0.1.
    ratio = paired_ratio([1.0, 2.0, 4.0], [2.0, 4.0 * math.exp(0.1), 8.0 * math.exp(-0.1)])
    margin = 4.303 * 0.1 / math.sqrt(3)
    assert ratio.geomean == pytest.approx(2.0)
    assert ratio.low == pytest.approx(2 * math.exp(-margin))
    assert ratio.high == pytest.approx(2 * math.exp(margin))
    assert ratio.differs_from_one()
    assert not paired_ratio([1.0, 1.0], [1.1, 0.9]).differs_from_one()


@pytest.mark.parametrize(("a", "b"), [([1.0], [2.0]), ([1.0, 2.0], [1.0]), ([1.0, 0.0], [1.0, 1])])
def test_no_ratio_without_pairs(a, b):
    with pytest.raises(ValueError, match=r"pairs|positive"):
        paired_ratio(a, b)


@pytest.mark.parametrize(
    ("a", "b", "index"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1)],
)
def test_first_index(a, b, index):
    assert first_index(a, b) == index


def test_differences_name_runs_prompts_and_tokens():
    runs = {"one": [[1, 2], [3, 4]], "two": [[1, 2], [3, 4]], "three": [[1, 2], [3, 9, 5]]}
    (difference,) = first_differences(runs)
    assert difference == (1, 1, "one", "three", 4, 9)
    assert "token 1 of prompt 1 is 4 in one and 9 in three" in str(difference)


def level(ids, seconds=1.0):
    """A level whose requests took `seconds` for their tokens."""
    traces = [
        Trace(0.0, [Step(0.1, 1), Step(seconds, len(i or [0, 0]))], seconds, i, None, [])
        for i in ids
    ]
    return Level(summarise(traces, 0.0, []), list(ids))


def rounds(b_ids, b_seconds=0.5, orders=("AB", "BA")):
    single, double = [[1, 2, 3]], [[1, 2, 3], [4, 5, 6]]
    return [
        pair.Round(order, {"A": [level(single), level(double)],
                           "B": [level(b_ids[:1], b_seconds), level(b_ids, b_seconds)]})
        for order in orders
    ]  # fmt: skip


ARMS = {"A": pair.Arm("target-only", [], None), "B": pair.Arm("DSpark", ["x"], None)}


def test_equal_outputs_give_a_ratio(capsys):
    measured = rounds([[1, 2, 3], [4, 5, 6]])
    identical, differences = pair.compare_outputs(measured)
    assert identical
    speed_up = {1: pair.ratios(measured, 0)}
    assert speed_up[1]["end_to_end"].geomean == pytest.approx(2.0)
    assert "scheduler_output" not in speed_up[1]
    pair.print_verdict(ARMS, speed_up, identical, differences)
    assert "DSpark over target-only, identical outputs" in capsys.readouterr().out


def test_other_outputs_are_no_speed_up(capsys):
    identical, differences = pair.compare_outputs(rounds([[1, 2, 3], [4, 5, 7]]))
    assert identical is False
    assert {(d.prompt, d.position) for d in differences} == {(1, 2)}
    pair.print_verdict(ARMS, None, identical, differences)
    out = capsys.readouterr().out
    assert "NO SPEED-UP" in out
    assert "x, 95 %" not in out


def test_servers_without_ids_are_not_called_identical(capsys):
    measured = rounds([None, None])
    assert pair.compare_outputs(measured) == (None, [])
    pair.print_verdict(ARMS, {1: pair.ratios(measured, 0)}, None, [])
    assert "outputs not compared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--a-url", "http://x"], "both"),
        ([], "both arms"),
        (["--model-path", "m", "--rounds", "1"], "at least 2 rounds"),
    ],
)
def test_a_ratio_needs_both_arms_and_two_rounds(argv, message, capsys):
    with pytest.raises(SystemExit):
        pair.parse(argv)
    assert message in capsys.readouterr().err


def test_default_arms_are_target_only_and_dspark():
    arms = pair.arms_of(pair.parse(["--model-path", "m"]))
    assert [arm.label for arm in arms.values()] == ["target-only", "DSpark"]
    assert arms["A"].flags == []
    assert arms["B"].flags == ["--speculative-algorithm", "dspark"]
    named = pair.arms_of(
        pair.parse(["--model-path", "m", "--a-url", "http://h:1/", "--b", "--x 1"])
    )
    assert named["A"].target.url == "http://h:1"
    assert (named["B"].label, named["B"].flags) == ("--x 1", ["--x", "1"])


def test_a_failing_arm_ends_without_a_ratio(monkeypatch, capsys):
    def fail(*_):
        raise BenchError("the server ended")

    monkeypatch.setattr(pair, "run", fail)
    assert pair.main(["--model-path", "m"]) == 2
    assert "no speed-up without both arms: the server ended" in capsys.readouterr().err


def test_short_outputs_are_refused():
    trace = Trace(0.0, [Step(1.0, 5)], 1.0, None, None, [])
    with pytest.raises(BenchError, match="5 tokens instead of 8"):
        check_complete(Load(0.0, [trace], [], True), 8)


def test_context_ends_where_the_runs_part():
    runs = {"a": [[1, 2, 3]], "b": [[1, 9, 3]]}
    (difference,) = first_differences(runs)
    assert exact.context_of(difference, [[7, 8]], runs) == [7, 8, 1]


def test_exactness_needs_two_starts(capsys):
    with pytest.raises(SystemExit):
        exact.parse(["--model-path", "m", "--starts", "1"])
    assert "use at least 2" in capsys.readouterr().err
