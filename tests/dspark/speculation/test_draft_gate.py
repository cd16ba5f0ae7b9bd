"""When drafting pauses, and how it comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.speculation import draft_gate
from dspark.speculation.draft_gate import PAUSES, TRIAL, Brought, Costs, DraftGate, Result, pays
from dspark.speculation.step_cost import Steps

DEPTH = 5
# A step of one request: 10 ms without a draft, 15 ms with one, and 1 ms a verified draft.
COST = (Steps(1, (1, 6), (0.015, 0.020), 0.010),)
COSTS = draft_gate.costs_of(COST, 1, DEPTH)


@pytest.mark.parametrize(
    ("accepted", "verified", "expected"),
    [
        (0, 0, False),
        (0.49, 0, False),
        (0.5, 0, True),
        (0.99, 5, False),
        (1.0, 5, True),
        (3, 5, True),
    ],
)
def test_drafting_pays_where_its_tokens_are_worth_its_time(accepted, verified, expected):
    """1.5 tokens in 15 ms and 2 tokens in 20 ms are what one token in 10 ms is."""
    lately = Brought(8, 8 * accepted, 8 * verified), Brought()
    assert pays(COSTS, lately, (1, 0)) is expected


def test_a_batch_is_judged_by_its_mixture():
    """Two greedy requests with 3 right of 4 drafts, six sampled ones with none of 4."""
    lately = Brought(2, 6, 8), Brought(4, 0, 16)
    drafted = [0.010] * 32 + [0.020]
    # 8 + 6 tokens in 20 ms against 8 in `without`
    assert pays(Costs(0.0115, drafted), lately, (2, 6))
    assert not pays(Costs(0.0114, drafted), lately, (2, 6))
    assert not pays(Costs(0.0199, drafted), lately, (0, 8))
    assert pays(Costs(0.0100, drafted), lately, (8, 0))


@pytest.mark.parametrize("costs", [COSTS._replace(without=None), COSTS])
def test_unknown_costs_and_classes_are_drafted_for(costs):
    lately = (Brought(), Brought()) if costs.without else (Brought(9, 0, 9), Brought())
    assert pays(costs, lately, (1, 0))


def played(gate: DraftGate, steps: int, accepted: int, verified=DEPTH, sampled=False) -> str:
    """A letter a step: d drafted, e explored, p paused."""
    letters = []
    for _ in range(steps):
        turn = gate.turn([sampled])
        letters.append("e" if turn.explore else "d" if turn.draft else "p")
        assert turn.counts == (letters[-1] == "d")
        if turn.counts:
            gate.record([Result(sampled, accepted, verified)])
    return "".join(letters)


def test_pauses_get_longer_while_trials_fail():
    gate = DraftGate(COST, DEPTH)
    trial = "e" + "d" * (TRIAL - 1)
    expected = "d" + "".join("p" * n + trial for n in (*PAUSES, PAUSES[-1]))
    assert played(gate, len(expected), accepted=0) == expected
    assert gate.without_draft == sum(PAUSES) + PAUSES[-1]


def test_drafts_that_are_right_are_never_paused():
    assert played(DraftGate(COST, DEPTH), 500, accepted=3) == "d" * 500


def test_drafting_comes_back_with_the_text_and_the_next_pause_is_short():
    gate = DraftGate(COST, DEPTH)
    played(gate, 600, accepted=0)
    later = played(gate, 700, accepted=5)
    assert later.endswith("d" * 300)
    later = played(gate, 200, accepted=0)
    assert len(later.strip("d").split("e")[0]) == PAUSES[0]


def test_a_class_that_pays_is_drafted_for_while_the_other_is_not():
    gate = DraftGate(COST, DEPTH)
    played(gate, 50, accepted=5)
    for _ in range(50):
        gate.record([Result(True, 0, DEPTH)])
    assert gate.turn([False]).draft
    assert not gate.turn([True]).draft


def test_a_batch_for_which_drafting_pays_does_not_wait_for_the_end_of_a_pause():
    """A draft right a step: worth its time for one request, but not for four."""
    gate = DraftGate((COST[0], Steps(4, (4, 24), (0.060, 0.090), 0.020)), DEPTH)
    turns = []
    for requests in (4, 4, 4, 1, 1, 4, 4):
        turns.append(gate.turn([False] * requests).draft)
        if turns[-1]:
            gate.record([Result(False, 2, 2), Result(False, 0, 0)])
    assert turns == [True, False, False, True, True, False, False]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, DEPTH), st.integers(0, DEPTH))))
def test_the_same_results_give_the_same_turns_and_no_pause_lasts(results):
    def turns():
        gate, found = DraftGate(COST, DEPTH), []
        for sampled, accepted, more in results:
            found.append(gate.turn([sampled]))
            if found[-1].counts:
                verified = min(DEPTH, accepted + more)
                gate.record([Result(sampled, accepted, verified)])
        return found

    first = turns()
    assert first == turns()
    longest = max(
        (len(run) for run in "".join(".p"[not t.draft] for t in first).split(".")), default=0
    )
    assert longest <= PAUSES[-1]


def test_what_was_forgotten_is_unknown():
    gate = DraftGate(COST, DEPTH)
    played(gate, 40, accepted=0)
    gate.forget()
    assert gate.without_draft == 0
    assert played(gate, 3, accepted=5) == "ddd"
