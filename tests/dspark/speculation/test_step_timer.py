"""Which rows are run while steps are measured, and whose time is whose."""

import pytest

from dspark.speculation import step_cost
from dspark.speculation.step_timer import SETTLING, StepTimer, complete, steps_of, turns_of

DEPTH = 5


class Machine:
    """Steps of 5 ms, 1 ms a row, and 3 ms for a draft; between two steps the host takes 1 ms."""

    def __init__(self):
        self.now = 0.0
        self.timer = StepTimer(DEPTH, clock=lambda: self.now)

    def run(self, requests: int, steps: int) -> list:
        turns = []
        for _ in range(steps):
            turns.append(self.timer.turn(requests))
            drafts = turns[-1].measured or 0
            self.now += 0.006 + 0.001 * requests * (1 + drafts) + 0.003 * turns[-1].draft
        return turns

    def prompt(self) -> None:
        self.timer.interrupt()
        self.now += 7.0


def test_everything_is_measured_in_so_many_steps():
    kinds = [(turn.draft, turn.measured) for turn in turns_of(DEPTH)]
    assert kinds == [(True, 5), (False, None), (True, 0), (True, 2), (True, 1)]
    assert [(turn.draft, turn.measured) for turn in turns_of(1)] == [
        (True, 1),
        (False, None),
        (True, 0),
    ]
    turns = Machine().run(2, steps_of(DEPTH))
    assert list(dict.fromkeys(turns)) == list(turns_of(DEPTH))


def test_a_step_lasts_until_the_next_begins():
    machine = Machine()
    for requests in (1, 4):
        machine.prompt()
        machine.run(requests, steps_of(DEPTH) + 1)
    one, four = step_cost.from_samples(complete(machine.timer.samples, DEPTH))
    assert one.rows == (1, 2, 3, 6)
    assert one.seconds == pytest.approx([0.009 + 0.001 * n for n in one.rows])
    assert one.without_draft == pytest.approx(0.007)
    assert four.rows == (4, 8, 12, 24)
    assert four.without_draft == pytest.approx(0.010)


def test_a_prompt_between_two_steps_is_nobodys_time():
    machine = Machine()
    for _ in range(3 * steps_of(DEPTH)):
        machine.run(1, 1)
        machine.prompt()
    assert machine.timer.samples == []


def test_a_batch_of_another_size_begins_anew():
    machine = Machine()
    machine.run(1, SETTLING + 1)
    assert machine.run(3, 1) == [turns_of(DEPTH)[0]]
    assert machine.timer.samples == []


def test_sizes_of_which_something_is_missing_are_left_out():
    machine = Machine()
    machine.run(2, steps_of(DEPTH) - 3)  # the last kind's steps are not there
    machine.run(8, steps_of(DEPTH) + 1)
    assert {s.requests for s in machine.timer.samples} == {2, 8}
    assert {s.requests for s in complete(machine.timer.samples, DEPTH)} == {8}
