"""What the demo says of two runs."""

import pytest

from dspark.commands import demo
from dspark.commands.demo import Completion, Difference


def completion(ids, accepted=(), seconds=2.0, sampled=False, text="one\ntwo"):
    return Completion("a\nprompt", text, list(ids), seconds, list(accepted), sampled)


def test_rate_leaves_the_first_token_out():
    assert completion(range(9)).tokens_per_second == 4.0


def test_acceptance_by_position():
    # Ten steps: four accepted nothing, three one draft, one two drafts, two all three.
    assert demo.acceptance_by_position([4, 3, 1, 2]) == pytest.approx([0.6, 0.3, 0.2])
    assert demo.add_up([[1, 2], [3, 4, 5]]) == [4, 6, 5]


def test_acceptance_is_of_the_greedy_ones():
    said = demo.acceptance(
        [
            completion(range(13), [2, 4]),
            completion(range(9), [0, 4]),
            completion(range(9), [9, 0], sampled=True),
        ]
    )
    assert said == "Drafts: 2.00 tokens a verify step; accepted by position 1: 80%."
    assert demo.acceptance([completion(range(3))]) == "DSpark reported no verify step."


def test_the_verdict_counts_or_names_the_first_difference():
    same = [completion([1, 2, 3]), completion([4, 5], sampled=True)]
    assert demo.first_difference(same, same) is None
    assert demo.verdict(same, same) == (
        "SAME TOKENS: all 5 tokens are identical with and without DSpark "
        "(3 greedy, 2 sampled under a seed)."
    )
    for ids, found in (
        ([1, 7, 3], (1, 2, 7)),
        ([1, 2], (2, 3, None)),
        ([1, 2, 3, 4], (3, None, 4)),
    ):
        other = [completion(ids), same[1]]
        assert demo.first_difference(same, other) == Difference("a\nprompt", *found)
    assert demo.verdict(same, [completion([1, 7, 3]), same[1]]) == (
        "DIFFERENT: token 1 of 'a\\nprompt' is 2 without and 7 with DSpark."
    )


def test_speed_is_of_the_greedy_ones():
    target = [completion(range(11), seconds=2.0), completion(range(99), sampled=True)]
    drafted = [completion(range(11), seconds=1.0), completion(range(99), sampled=True)]
    assert demo.speed(target, drafted).startswith(
        "Decoding: 5.0 tokens/s by the target alone, 10.0 with DSpark: 2.00x in this run"
    )


def test_the_report_leads_with_the_verdict_and_tells_prompt_and_completion_apart():
    text = "\n".join(f"line {i}" for i in range(demo.SHOWN_LINES + 3))
    runs = [completion([1, 2], [0, 1], text=text), completion([3], [1], sampled=True)]
    said = demo.report(runs, runs).splitlines()
    assert said[0].startswith("SAME TOKENS: all 3 tokens")
    first = said.index("-- greedy")
    assert said[first + 1 : first + 4] == ["> a", "> prompt", "| line 0"]
    assert "| ... 3 more lines" in said
    assert "-- sampled at temperature 0.8" in said
    assert "\n".join(said[-2:]) == demo.WHY_IT_REPEATS
