"""Whether a step drafts at all: not while drafting gives fewer tokens a second than going without.

Decided on the host, from results that are there anyway, before a step is launched. What drafting
brought lately, tokens and verified drafts a request, is set against the table of what a step costs.
Where it does not pay, drafts pause; a trial of a few steps follows, and after every trial that
fails a longer pause. Outputs depend on none of it. All ranks of a server count alike.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from dspark.speculation.online_calibration import CLASSES
from dspark.speculation.step_cost import StepCost, seconds_by_budget, seconds_without_draft
from dspark.speculation.turn import DRAFT, NO_DRAFT, Turn

HALF_LIFE = 24  # steps of a request of the class
DECAY = 0.5 ** (1 / HALF_LIFE)
STALE = 0.25  # weight of what was known before a pause
TRIAL = 3  # steps; the first verifies everything and counts only for the calibration
PAUSES = (32, 64, 128, 256)  # steps; the last for as long as it takes
SIZES_KEPT = 256  # of batches whose costs are kept


COUNTS, EXPLORE = DRAFT._replace(counts=True), DRAFT._replace(explore=True)


class Brought(NamedTuple):
    """Sums over steps of requests of one class, discounted by their age."""

    steps: float = 0.0
    accepted: float = 0.0
    verified: float = 0.0  # drafts

    def aged(self, by: float) -> "Brought":
        return Brought(*(by * value for value in self))

    def after(self, accepted: int, verified: int) -> "Brought":
        kept = self.aged(DECAY)
        return Brought(kept.steps + 1, kept.accepted + accepted, kept.verified + verified)


class Result(NamedTuple):
    """One request's step."""

    sampled: bool
    accepted: int  # drafts
    verified: int


class Costs(NamedTuple):
    """Seconds of a step of one number of requests."""

    without: float | None  # without a draft; None: nobody has measured it
    drafted: Sequence[float]  # by the drafts that are verified, from 0 on


def costs_of(cost: StepCost, requests: int, depth: int) -> Costs:
    return Costs(seconds_without_draft(cost, requests), seconds_by_budget(cost, requests, depth))


def pays(costs: Costs, brought: Sequence[Brought], counts: Sequence[int]) -> bool:
    """Whether drafting gives at least as many tokens a second; True where nothing is known.

    Args:
        costs: of a step of these requests.
        brought: of each class. counts: requests of each class.
    """
    seen = [(lately, n) for lately, n in zip(brought, counts, strict=True) if n]
    if costs.without is None or not all(lately.steps for lately, _ in seen):
        return True
    requests = sum(counts)
    tokens = requests + sum(n * lately.accepted / lately.steps for lately, n in seen)
    drafts = sum(n * lately.verified / lately.steps for lately, n in seen)
    return tokens * costs.without >= requests * _between(costs.drafted, drafts)


def _between(values: Sequence[float], at: float) -> float:
    low = min(int(at), len(values) - 1)
    high = min(low + 1, len(values) - 1)
    return values[low] + (at - low) * (values[high] - values[low])


class DraftGate:
    """Turns of a server's steps, in their order.

    Results may come while later steps are under way. A trial is judged with the results known when
    its last step has been launched, so the result of that step counts for the next judgement.
    """

    def __init__(self, cost: StepCost, depth: int):
        self._costs = lru_cache(SIZES_KEPT)(lambda requests: costs_of(cost, requests, depth))
        self.forget()

    def forget(self) -> None:
        self._brought = [Brought() for _ in CLASSES]
        self._pause = 0  # steps left
        self._trial = 0  # steps left
        self._failed = 0  # trials in a row
        self.without_draft = 0  # steps so far

    def turn(self, sampled: Sequence[bool]) -> Turn:
        """The next step's. sampled: of each request, False = greedy."""
        if self._trial:
            self._trial -= 1
            return EXPLORE if self._trial == TRIAL - 1 else COUNTS
        if self._pays(sampled):  # also in a pause, for a batch unlike those that began it
            self._pause = self._failed = 0
            return COUNTS
        if not self._pause:
            self._begin_pause()
        self._pause -= 1
        self.without_draft += 1
        if not self._pause:
            self._trial = TRIAL
        return NO_DRAFT

    def record(self, results: Sequence[Result]) -> None:
        """What a step brought whose turn counts."""
        for sampled, accepted, verified in results:
            self._brought[sampled] = self._brought[sampled].after(accepted, verified)

    def _pays(self, sampled: Sequence[bool]) -> bool:
        drawn = sum(sampled)
        counts = len(sampled) - drawn, drawn
        return pays(self._costs(len(sampled)), self._brought, counts)

    def _begin_pause(self) -> None:
        self._pause = PAUSES[min(self._failed, len(PAUSES) - 1)]
        self._failed += 1
        self._brought = [brought.aged(STALE) for brought in self._brought]
