"""Calibration that follows the text: what it learns, forgets and survives."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.speculation import online_calibration as online
from dspark.speculation.online_calibration import BELIEF, BINS, DECAY, HALF_LIFE, OnlineCalibration

GAMMA = 3
GREEDY, SAMPLED = torch.tensor([False]), torch.tensor([True])
TRUST = torch.full((1, GAMMA), 0.6)


def learned(steps: int, right: int, rows: int = GAMMA + 1, sampled=GREEDY, trust=TRUST):
    seen = online.nothing_seen(trust.shape[1], "cpu")
    for _ in range(steps):
        seen = online.updated(seen, trust, sampled, torch.tensor([right]), torch.tensor([rows]))
    return seen


def test_a_step_by_hand():
    """Two drafts right and the third judged wrong: 0.4 and 0.4 more than said, 0.6 less."""
    seen = learned(1, right=2)
    cell = int(0.6 * BINS)
    assert seen.tested[:, cell].tolist() == [1.0, 1.0, 1.0]
    assert seen.surplus[:, cell].tolist() == pytest.approx([0.4, 0.4, -0.6])
    assert float(seen.tested.sum()) == GAMMA
    found = online.corrected(seen, TRUST, GREEDY)[0].tolist()
    assert found == pytest.approx([0.6 + 0.4 / 9, 0.6 + 0.4 / 9, 0.6 - 0.6 / 9])
    assert online.corrected(seen, TRUST, SAMPLED)[0].tolist() == pytest.approx([0.6] * GAMMA)
    another = torch.full((1, GAMMA), 0.3)
    assert online.corrected(seen, another, GREEDY)[0].tolist() == pytest.approx([0.3] * GAMMA)


@pytest.mark.parametrize(
    ("right", "rows", "judged"), [(0, 4, 1), (1, 4, 2), (3, 4, 3), (0, 1, 0), (1, 2, 1), (2, 3, 2)]
)
def test_a_draft_behind_a_wrong_one_or_without_a_row_says_nothing(right, rows, judged):
    tested = learned(1, right, rows).tested.sum(1)
    assert tested.tolist() == [float(k < judged) for k in range(GAMMA)]


def test_confidences_become_the_frequencies_of_the_text_served():
    """Drafts said to be right with 0.55 to 0.6 are right three times in ten, of either class."""
    chance = torch.Generator().manual_seed(0)
    seen = online.nothing_seen(1, "cpu")
    sampled = torch.tensor([False, True])
    for _ in range(4 * HALF_LIFE):
        trust = 0.55 + 0.05 * torch.rand(2, 1, generator=chance)
        right = (torch.rand(2, generator=chance) < torch.tensor([0.3, 0.9])).int()
        seen = online.updated(seen, trust, sampled, right, torch.tensor([2, 2]))
    found = online.corrected(seen, torch.full((2, 1), 0.575), sampled)[:, 0]
    assert found.tolist() == pytest.approx([0.3, 0.9], abs=0.05)


def test_the_other_text_is_forgotten():
    """Endless wrong drafts and a half-life of right ones weigh the same."""
    weight = 1 / (1 - DECAY)  # of endless steps
    seen = online.Seen(*(torch.zeros(1, 2 * BINS) for _ in range(2)))
    seen.tested[0, 4], seen.surplus[0, 4] = weight, -0.6 * weight
    for _ in range(HALF_LIFE):
        seen = online.updated(seen, TRUST[:, :1], GREEDY, torch.tensor([1]), torch.tensor([2]))
    assert float(seen.surplus[0, 4] / seen.tested[0, 4]) == pytest.approx(-0.1, abs=0.01)


def test_drafts_that_nobody_verifies_get_their_confidence_back():
    seen = learned(HALF_LIFE, right=0)
    assert float(online.corrected(seen, TRUST, GREEDY)[0, 0]) < 0.05
    for _ in range(12 * HALF_LIFE):
        seen = online.updated(seen, TRUST, GREEDY, torch.tensor([0]), torch.tensor([1]))
    assert float(online.corrected(seen, TRUST, GREEDY)[0, 0]) == pytest.approx(0.6, abs=0.03)


def test_a_class_does_not_age_by_the_steps_of_the_other():
    seen = learned(9, right=1)
    later = online.updated(seen, TRUST, SAMPLED, torch.tensor([1]), torch.tensor([GAMMA + 1]))
    assert later.tested[:, :BINS].equal(seen.tested[:, :BINS])


def test_a_step_without_a_draft_ages_what_was_seen():
    made = OnlineCalibration(GAMMA, "cpu")
    made.learn(TRUST, SAMPLED, torch.tensor([3]), torch.tensor([4]))
    for _ in range(HALF_LIFE):
        made.age(SAMPLED)
    assert made.report()["sampled"] == {"tested": [0.5] * 3, "surplus": [0.4] * 3}


HOSTILE = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1.0, 7.0]) | st.floats(
    0, 1, width=32
)


@st.composite
def a_step(draw):
    """(confidence, sampled, right, rows) of one to four requests."""
    requests = draw(st.integers(1, 4))
    rows = draw(st.lists(st.integers(1, GAMMA + 1), min_size=requests, max_size=requests))
    blocks = st.lists(HOSTILE, min_size=GAMMA, max_size=GAMMA)
    return (
        torch.tensor(draw(st.lists(blocks, min_size=requests, max_size=requests))),
        torch.tensor(draw(st.lists(st.booleans(), min_size=requests, max_size=requests))),
        torch.tensor([draw(st.integers(0, n - 1)) for n in rows]),
        torch.tensor(rows),
    )


@given(st.lists(a_step(), max_size=12))
def test_whatever_comes_it_stays_bounded_and_probable(steps):
    seen = online.nothing_seen(GAMMA, "cpu")
    for confidence, sampled, right, rows in steps:
        found = online.corrected(seen, confidence, sampled)
        assert bool(((found >= 0) & (found <= 1)).all())
        seen = online.updated(seen, confidence, sampled, right, rows)
        assert seen.tested.shape == seen.surplus.shape == (GAMMA, 2 * BINS)
        assert bool(seen.tested.isfinite().all())
        assert bool((seen.surplus.abs() <= seen.tested * 1.0001).all())
        assert float(seen.tested.max()) <= 4 / (1 - DECAY**4)


@given(st.lists(a_step(), min_size=1, max_size=6))
def test_the_same_steps_teach_the_same_bits_and_none_of_them_is_changed(steps):
    kept = [tuple(part.clone() for part in step) for step in steps]
    runs = []
    for _ in range(2):
        made = OnlineCalibration(GAMMA, "cpu")
        found = []
        for confidence, sampled, right, rows in steps:
            found.append(made.corrected(confidence, sampled))
            made.learn(confidence, sampled, right, rows)
        runs.append((found, made.report()))
    assert runs[0][1] == runs[1][1]
    assert all(a.equal(b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    for step, before in zip(steps, kept, strict=True):
        assert all(
            a.nan_to_num(9).equal(b.nan_to_num(9)) for a, b in zip(step, before, strict=True)
        )


@given(st.lists(a_step(), max_size=6))
def test_what_was_forgotten_leaves_no_trace(steps):
    made = OnlineCalibration(GAMMA, "cpu")
    for confidence, sampled, right, rows in steps:
        made.learn(confidence, sampled, right, rows)
    made.forget()
    assert made.corrected(TRUST, GREEDY).equal(TRUST)
    assert made.report()["sampled"] == {"tested": [0.0] * GAMMA, "surplus": [0.0] * GAMMA}


def test_the_report_is_of_each_position():
    made = OnlineCalibration(GAMMA, "cpu")
    made.learn(TRUST, SAMPLED, torch.tensor([1]), torch.tensor([4]))
    assert made.report() == {
        "greedy": {"tested": [0.0] * 3, "surplus": [0.0] * 3},
        "sampled": {"tested": [1.0, 1.0, 0.0], "surplus": [0.4, -0.6, 0.0]},
    }


def test_more_belief_than_evidence_moves_little():
    seen = learned(1, right=0)
    moved = 0.6 - float(online.corrected(seen, TRUST, GREEDY)[0, 0])
    assert moved == pytest.approx(0.6 / (1 + BELIEF))
