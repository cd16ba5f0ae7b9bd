"""Tables of what a step costs by its rows."""

import json

import pytest

from dspark.speculation import step_cost


def test_cost_table_takes_medians_and_never_gets_faster_with_more_rows():
    cost = step_cost.from_samples({2: [0.1, 0.1, 9.0], 8: [0.05, 0.08, 0.07], 4: [0.2]})
    assert cost.rows == (2, 4, 8)
    assert cost.steps_per_second == pytest.approx((10.0, 5.0, 5.0))


def test_cost_table_survives_the_file_and_clamps_at_both_ends(tmp_path):
    cost = step_cost.StepCost((2, 4), (10.0, 5.0), 6)
    step_cost.save(cost, tmp_path / "cost.json")
    assert step_cost.load(tmp_path / "cost.json") == cost
    assert step_cost.rate_table(cost).tolist() == [10, 10, 10, 10, 5, 5, 5]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"sample_batch_tokens": [4, 2]}, "strictly increase"),
        ({"sample_steps_per_sec": [5.0, 10.0]}, "never increase"),
        ({"sample_steps_per_sec": [5.0]}, "one step rate for each"),
        ({"max_batch_tokens": 3}, "below the largest sample"),
        ({"sample_steps_per_sec": [5.0, 0.0]}, "must be positive"),
        ({"sample_batch_tokens": "many"}, "not a step cost table"),
    ],
)
def test_a_bad_cost_table_is_named_in_one_sentence(tmp_path, change, complaint):
    good = {
        "sample_batch_tokens": [2, 4],
        "sample_steps_per_sec": [10.0, 5.0],
        "max_batch_tokens": 4,
    }
    (tmp_path / "cost.json").write_text(json.dumps(good | change))
    with pytest.raises(step_cost.TableError, match=complaint):
        step_cost.load(tmp_path / "cost.json")


def test_no_samples_make_no_table():
    with pytest.raises(step_cost.TableError):
        step_cost.from_samples({4: []})
