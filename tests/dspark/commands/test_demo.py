"""Figures the demo prints."""

import pytest

from dspark.commands import demo
from dspark.commands.demo import Completion


def completion(ids, accepted=()):
    return Completion("a prompt", list(ids), 2.0, list(accepted))


def test_rate_leaves_the_first_token_out():
    assert completion(range(9)).tokens_per_second == 4.0


def test_acceptance_by_position():
    # Ten steps: four accepted nothing, three one draft, one two drafts, two all three.
    assert demo.acceptance_by_position([4, 3, 1, 2]) == pytest.approx([0.6, 0.3, 0.2])
    assert demo.add_up([[1, 2], [3, 4, 5]]) == [4, 6, 5]


def test_acceptance_report(capsys):
    demo.report_acceptance([completion(range(13), [2, 4]), completion(range(9), [0, 4])])
    out = capsys.readouterr().out
    assert "2.00 tokens per verify step" in out
    assert "1: 80%" in out


def test_verdict_names_the_first_difference(capsys):
    same = [completion([1, 2, 3])]
    assert demo.verdict(same, same)
    assert "all 3 tokens are identical" in capsys.readouterr().out
    assert not demo.verdict(same, [completion([1, 7, 3])])
    assert "token 1 of 'a prompt' is 2 without and 7 with DSpark" in capsys.readouterr().out
    assert not demo.verdict(same, [completion([1, 2])])
    assert "is 3 without and None" in capsys.readouterr().out
