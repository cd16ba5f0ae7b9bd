"""Measures what steps cost, by running them: every number of rows in turn, none of it accepted.

While it runs every step emits one token a request, so a batch stays what it is, and outputs are
what they always are. A step lasts from its beginning to that of the next, with all that the host
does between. Each number of rows is held for a few steps, of which the first do not count: work
that is launched ahead shows in a later step.
"""

import time
from collections.abc import Callable, Iterable

from dspark.speculation.step_cost import Sample
from dspark.speculation.turn import NO_DRAFT, Turn

SETTLING = 2  # steps that do not count
COUNTING = 2  # steps that do


def turns_of(depth: int) -> tuple[Turn, ...]:
    """What is measured of each batch, the two ends first."""
    each = dict.fromkeys((depth, 0, depth // 2, 1))
    most, *others = (Turn(draft=True, measured=n) for n in each)
    return (most, NO_DRAFT, *others)


def steps_of(depth: int) -> int:
    """Steps in which everything is measured of one batch."""
    return len(turns_of(depth)) * (SETTLING + COUNTING)


def complete(samples: Iterable[Sample], depth: int) -> list[Sample]:
    """Those of batch sizes of which everything was measured."""
    found = list(samples)
    kinds: dict[int, set[tuple[int, bool]]] = {}
    for requests, rows, _, drafted in found:
        kinds.setdefault(requests, set()).add((rows, drafted))
    return [s for s in found if len(kinds[s.requests]) == len(turns_of(depth))]


class StepTimer:
    """The turns of steps, and how long they took.

    clock: seconds.
    """

    def __init__(self, depth: int, clock: Callable[[], float] = time.perf_counter):
        self.samples: list[Sample] = []
        self._turns, self._clock = turns_of(depth), clock
        self._requests = 0
        self._step = 0  # of the batch
        self._began: float | None = None  # the step before, where its time counts

    def turn(self, requests: int) -> Turn:
        """The next step's; it begins now."""
        now = self._clock()
        if requests != self._requests:
            self._requests, self._step, self._began = requests, 0, None
        turn, place = self._at(self._step)
        if self._began is not None:
            before, _ = self._at(self._step - 1)
            rows = requests * (1 + (before.measured or 0))
            self.samples.append(Sample(requests, rows, now - self._began, before.draft))
        self._began = now if place >= SETTLING else None
        self._step += 1
        return turn

    def interrupt(self) -> None:
        """Something else runs before the next step."""
        self._began = None

    def _at(self, step: int) -> tuple[Turn, int]:
        """The turn of a step, and for how many steps it has been held."""
        turn, place = divmod(step, SETTLING + COUNTING)
        return self._turns[turn % len(self._turns)], place
