"""How many draft rows each request verifies: a token budget spent on the likeliest drafts.

The budget is chosen from the confidences of an *earlier* step and only distributed by those of
this one. Choosing the budget by looking at the very drafts it decides about would favour lucky
ones and bias the output (DSpark paper, non-anticipation).
"""

import enum
from functools import lru_cache
from typing import NamedTuple

import torch

from dspark.kernels.schedule import schedule
from dspark.kernels.schedule.reference import survival
from dspark.speculation.step_cost import StepCost, seconds_by_budget
from dspark.state.upload import Upload

COSTS_KEPT = 256  # batch sizes whose costs stay on the device


class Mode(enum.Enum):
    STATIC = "static"  # verify every draft
    SCHEDULED = "scheduled"  # verify what the budget admits
    CAP_ACCEPT = "cap-accept"  # verify every draft, accept only what the budget admits


class VerifyRows(NamedTuple):
    """Rows of each request, the one of the last emitted token included; i32 [R]."""

    run: torch.Tensor  # rows the target runs; the rest of the verify width is padding
    acceptable: torch.Tensor  # rows that may be accepted, 1..run


def same_rows(slot: torch.Tensor, run: int, acceptable: int) -> VerifyRows:
    """The same of every request. slot: i64 [R]."""
    return VerifyRows(*(torch.full_like(slot, n, dtype=torch.int32) for n in (run, acceptable)))


def best_budget(chance: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
    """Draft rows K that maximise expected tokens a second: (R + sum of the K largest) / seconds.

    Args:
        chance: f32 [R, depth] survival of each draft, estimated without looking at it.
        seconds: f64 [R * depth + 1] of a step of these R requests that verifies K drafts.

    Returns:
        i32 [1]; the smaller K where two are equal.
    """
    gain = torch.sort(chance.double().flatten(), descending=True).values
    tokens = chance.shape[0] + torch.cat([gain.new_zeros(1), gain.cumsum(0)])
    return (tokens / seconds).argmax().to(torch.int32)[None]


class VerifyScheduler:
    """Verify rows of each step, and the confidences remembered for the next budget.

    Args:
        mode: see `Mode`.
        gamma: drafts per block. depth: drafts that may be verified, <= gamma.
        slots: request slots. Confidences are kept by slot; a new owner starts with survival 1.
        cost: of a step by its requests and rows, None = verify everything.
    """

    def __init__(
        self,
        mode: Mode,
        gamma: int,
        depth: int,
        slots: int,
        cost: StepCost | None,
        device: torch.device | str,
    ):
        self.mode, self.depth, self.cost = mode, depth, cost
        self._upload = Upload(8 * (slots * depth + 1), torch.device(device))
        self._seconds = lru_cache(COSTS_KEPT)(self._costs)
        self.remembered = torch.ones(slots, gamma, device=device)
        self.forced_rows: int | None = None  # a fixed budget, for measurements
        self.forced_share: float | None = None  # of all drafts, for measurements

    @property
    def is_forced(self) -> bool:
        """Whether the budget does not depend on what steps cost."""
        return self.forced_rows is not None or self.forced_share is not None

    def admit(self, slot: torch.Tensor) -> None:
        """Forget the previous owner. slot: i64 [n]."""
        self.remembered[slot] = 1.0

    def rows(self, confidence: torch.Tensor, slot: torch.Tensor) -> VerifyRows:
        """confidence: f32 [R, gamma] of this step's drafts. slot: i64 [R]."""
        full = torch.full_like(slot, self.depth + 1, dtype=torch.int32)
        budget = self._budget(self.remembered[slot])
        self.remembered[slot] = confidence
        if self.mode is Mode.STATIC or budget is None:
            return VerifyRows(full, full)
        admitted = schedule(confidence, budget, max_len=self.depth + 1)
        return VerifyRows(full if self.mode is Mode.CAP_ACCEPT else admitted, admitted)

    def _budget(self, earlier: torch.Tensor) -> torch.Tensor | None:
        """i32 [1], or None where nothing is known about the cost of a row."""
        rows = self.forced_rows
        if rows is None and self.forced_share is not None:
            rows = round(self.forced_share * earlier.shape[0] * self.depth)
        if rows is not None:
            return torch.full((1,), rows, dtype=torch.int32, device=earlier.device)
        if self.cost is None:
            return None
        seconds = self._seconds(self.cost, len(earlier))
        return best_budget(survival(earlier)[:, : self.depth], seconds)

    def _costs(self, cost: StepCost, requests: int) -> torch.Tensor:
        """f64 [requests * depth + 1] seconds, on the device."""
        seconds = seconds_by_budget(cost, requests, self.depth)
        return self._upload(torch.tensor(seconds, dtype=torch.float64))
