"""Tables of what a step costs by its requests and rows."""

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.speculation import step_cost
from dspark.speculation.step_cost import Sample, Steps, TableError


def test_a_table_holds_medians_that_never_decrease():
    times = {(2, 2): [0.1, 0.1, 9.0], (2, 6): [0.2, 0.3], (2, 12): [0.24, 0.21], (1, 1): [0.05]}
    samples = [Sample(*at, seconds) for at, all_of in times.items() for seconds in all_of]
    random.Random(1).shuffle(samples)
    one, two = step_cost.from_samples(samples)
    assert one == Steps(1, (1,), (0.05,))
    assert (two.requests, two.rows) == (2, (2, 6, 12))
    # Medians 0.25 and 0.225 in the wrong order: both become their mean.
    assert two.seconds == pytest.approx((0.1, 0.2375, 0.2375))


def test_a_step_without_a_draft_is_the_least():
    """Medians 0.3 without and 0.2 with one row a request in the wrong order: both 0.26."""
    without = [Sample(2, 2, s, drafted=False) for s in (0.3, 0.3, 0.3)]
    drafted = [Sample(2, 2, 0.2), Sample(2, 2, 0.2), Sample(2, 12, 0.5)]
    (steps,) = step_cost.from_samples([*without, *drafted])
    assert steps.rows == (2, 12)
    assert steps.seconds == pytest.approx((0.26, 0.5))
    assert steps.without_draft == pytest.approx(0.26)
    assert step_cost.from_samples([*drafted, Sample(1, 1, 0.1, drafted=False)])[0].requests == 2


POSITIVE = st.floats(0.001, 10)


@given(st.lists(st.tuples(POSITIVE, st.integers(1, 9)), min_size=1, max_size=8))
def test_isotonic_values_are_the_nearest_of_all(pairs):
    """Against the min-max formula: max over starts of min over ends of the mean between them."""
    values, weights = zip(*pairs, strict=True)

    def mean(a, b):
        return sum(v * w for v, w in pairs[a:b]) / sum(weights[a:b])

    n = len(pairs)
    expected = [
        max(min(mean(a, b) for b in range(i + 1, n + 1)) for a in range(i + 1)) for i in range(n)
    ]
    assert step_cost.isotonic(values, weights) == pytest.approx(expected)


COST = (
    Steps(1, (1, 6), (0.010, 0.020)),
    Steps(4, (4, 12, 24), (0.020, 0.040, 0.100)),
)


@pytest.mark.parametrize(
    ("requests", "depth", "expected"),
    [
        (1, 5, [10, 12, 14, 16, 18, 20]),
        (4, 1, [20, 22.5, 25, 27.5, 30]),
        # Between 1 and 4 requests: a third of the way, at 0, 1/2 and 1 draft a request.
        (2, 1, [10 + 10 / 3, 11 + 14 / 3, 12 + 18 / 3]),
        (7, 0, [30]),  # beyond: another three requests cost what the last three did
        (4, 9, None),
    ],
)
def test_costs_between_and_beyond_the_measured_steps(requests, depth, expected):
    found = [1000 * s for s in step_cost.seconds_by_budget(COST, requests, depth)]
    assert len(found) == requests * depth + 1
    if expected is None:  # more drafts than were measured
        assert set(found[21:]) == {100.0}
    else:
        assert found == pytest.approx(expected)


def test_one_measured_batch_size_stands_for_all():
    assert step_cost.seconds_by_budget(COST[:1], 2, 1) == pytest.approx([0.010, 0.011, 0.012])


@pytest.mark.parametrize(
    ("requests", "milliseconds"), [(1, 5), (2, 8), (4, 14), (7, 23), (100, 302)]
)
def test_costs_without_a_draft_grow_with_the_requests(requests, milliseconds):
    cost = (COST[0]._replace(without_draft=0.005), COST[1]._replace(without_draft=0.014))
    assert step_cost.seconds_without_draft(cost, requests) == pytest.approx(milliseconds / 1000)
    assert step_cost.seconds_without_draft(cost[:1] + COST[1:], requests) is None


@given(st.data(), st.integers(1, 12))
def test_a_step_without_a_draft_never_costs_more(data, requests):
    samples = [
        Sample(size, size, data.draw(POSITIVE), drafted)
        for size in data.draw(st.sets(st.integers(1, 8), min_size=1, max_size=3))
        for drafted in (True, False)
    ]
    cost = step_cost.from_samples(samples)
    found = step_cost.seconds_without_draft(cost, requests)
    assert 0 < found <= step_cost.seconds_by_budget(cost, requests, 5)[0]


@given(st.data(), st.integers(1, 12), st.integers(1, 5))
def test_more_drafts_never_cost_less(data, requests, depth):
    samples = [
        Sample(size, rows, data.draw(POSITIVE))
        for size in data.draw(st.sets(st.integers(1, 8), min_size=1, max_size=3))
        for rows in data.draw(st.sets(st.integers(size, 6 * size), min_size=1, max_size=4))
    ]
    found = step_cost.seconds_by_budget(step_cost.from_samples(samples), requests, depth)
    assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(found))
    assert min(found) > 0


@pytest.mark.parametrize("without", [None, 0.0075])
def test_a_table_survives_the_file(tmp_path, without):
    cost = (COST[0]._replace(without_draft=without), COST[1])
    step_cost.save(cost, tmp_path / "cost.json")
    assert step_cost.load(tmp_path / "cost.json") == cost


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [
        ([], "strictly increase"),
        ([{"requests": 2}], "not a step cost table"),
        ([{"requests": 2, "rows": [2, 3], "milliseconds": [4]}], "each number of rows"),
        ([{"requests": 2, "rows": [1, 3], "milliseconds": [4, 5]}], "from one a request on"),
        ([{"requests": 2, "rows": [3, 3], "milliseconds": [4, 5]}], "from one a request on"),
        ([{"requests": 2, "rows": [2, 3], "milliseconds": [5, 4]}], "never decrease"),
        ([{"requests": 2, "rows": [2, 3], "milliseconds": [0, 4]}], "must be positive"),
        ([{"requests": 2, "rows": [2], "milliseconds": [1]}] * 2, "strictly increase"),
        ([{"requests": 2, "rows": [2], "milliseconds": [1], "without_draft": 2}], "less than any"),
        ([{"requests": 2, "rows": [2], "milliseconds": [1], "without_draft": []}], "not a step"),
        ([7], "not a step cost table"),
    ],
)
def test_a_bad_table_is_named_in_one_sentence(tmp_path, steps, complaint):
    (tmp_path / "cost.json").write_text(json.dumps({"steps": steps}))
    with pytest.raises(TableError, match=complaint):
        step_cost.load(tmp_path / "cost.json")


def test_a_table_by_rows_alone_is_refused(tmp_path):
    old = {"sample_batch_tokens": [1], "sample_steps_per_sec": [9.0], "max_batch_tokens": 1}
    (tmp_path / "cost.json").write_text(json.dumps(old))
    with pytest.raises(TableError, match=r"rows alone.*measure again with dspark profile-steps"):
        step_cost.load(tmp_path / "cost.json")


@pytest.mark.parametrize("samples", [[], [Sample(1, 1, 0.0)]])
def test_no_time_makes_no_table(samples):
    with pytest.raises(TableError):
        step_cost.from_samples(samples)
