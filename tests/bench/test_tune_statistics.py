"""The tuner's statistics on simulated sessions, where the truth is known."""

import math
import random
import subprocess
import sys

import pytest

from dspark.bench.tune import statistics as st
from dspark.bench.tune.schedule import balanced_orders, pair_plan

CASES = [f"r{r}" for r in (1, 2, 4, 8)]


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch):
    """Simulations run hundreds of sessions; 300 resamples place the 5th percentile well enough."""
    monkeypatch.setattr(st, "RESAMPLES", 300)


def session(rng, gain=1.0, noise=0.03, pairs=12, spoiled=()):
    """Log ratios of a candidate that is `gain` times faster, except on the `spoiled` cases."""
    return {
        case: [
            math.log(0.9 if case in spoiled else gain) + rng.gauss(0, noise) for _ in range(pairs)
        ]
        for case in CASES
    }


def verdict(rng, **kwargs):
    control = st.compare(session(rng), seed=1)
    candidates = {str(i): st.compare(session(rng, **kwargs), seed=2) for i in range(3)}
    return st.judge(control, candidates, st.Gates())


def test_pure_noise_is_rejected_in_at_least_95_percent_of_400_sessions():
    rng = random.Random(7)
    winners = sum(verdict(rng).status == "winner" for _ in range(400))
    assert winners <= 20


def test_a_planted_five_percent_gain_is_found():
    rng = random.Random(8)
    found = [st.compare(session(rng, gain=1.05), seed=3).passes(st.Gates()) for _ in range(100)]
    assert sum(found) >= 95


def test_one_bad_case_vetoes_a_candidate_that_wins_on_average():
    rng = random.Random(9)
    result = st.compare(session(rng, gain=1.2, spoiled=("r8",)), seed=4)
    assert result.geomean > 1.05
    assert result.worst.case == "r8"
    assert not result.passes(st.Gates())


def test_hand_computed_geomean_counts_cases_equally():
    samples = {"a": [math.log(2.0)] * 9, "b": [math.log(0.5)]}
    result = st.compare(samples, seed=0)
    assert result.geomean == pytest.approx(1.0)
    assert result.per_case == pytest.approx({"a": 2.0, "b": 0.5})
    assert result.worst.case == "b"


def test_the_lower_of_bootstrap_and_t_bound_is_taken():
    """Case means far apart: the bootstrap within cases is blind to it, the t interval is not."""
    samples = {f"c{i}": [value] * 8 for i, value in enumerate((0.0, 0.1, 0.2))}
    result = st.compare(samples, seed=0)
    assert result.ci_method == "t"
    assert math.log(result.ci_low) == pytest.approx(0.1 - 2.920 * 0.1 / math.sqrt(3))


def test_a_control_that_differs_from_itself_invalidates_the_session():
    rng = random.Random(10)
    drifted = st.compare(session(rng, gain=1.05, noise=0.001), seed=5)
    good = st.compare(session(rng, gain=1.10), seed=6)
    assert st.judge(drifted, {"c": good}, st.Gates()).status == "invalid_noise"


def test_the_surest_candidate_wins_not_the_fastest():
    rng = random.Random(11)
    control = st.compare(session(rng), seed=0)
    sure = st.compare(session(rng, gain=1.06, noise=0.002), seed=1)
    wild = st.compare(session(rng, gain=1.09, noise=0.25), seed=2)
    assert st.judge(control, {"sure": sure, "wild": wild}, st.Gates()).winner == "sure"


def test_rejected_candidates_cannot_win():
    rng = random.Random(12)
    control = st.compare(session(rng), seed=0)
    assert st.judge(control, {"broken": None}, st.Gates()).status == "no_improvement"


@pytest.mark.parametrize("pairs", [1, 2, 7, 20])
def test_orders_are_balanced(pairs):
    orders = balanced_orders(3, "schedule", "r8", "c1", pairs)
    assert len(orders) == pairs
    assert orders.count("AB") - orders.count("BA") == pairs % 2


def test_the_plan_is_the_same_in_another_process():
    here = pair_plan(5, "op", "cand", CASES, 6)
    code = (
        "from dspark.bench.tune.schedule import pair_plan;"
        f"print(pair_plan(5, 'op', 'cand', {CASES!r}, 6))"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == str(here)
    assert {p.case for p in here} == set(CASES)
    assert len(here) == 24


def test_times_must_be_positive():
    with pytest.raises(ValueError, match="positive"):
        st.log_ratio(0.0, 1.0)
