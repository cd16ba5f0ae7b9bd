"""How many draft rows each request verifies: a token budget spent on the likeliest drafts.

The budget is chosen from the confidences of an *earlier* step and only distributed by those of
this one. Choosing the budget by looking at the very drafts it decides about would favour lucky
ones and bias the output (DSpark paper, non-anticipation).
"""

import enum
from typing import NamedTuple

import torch

from dspark.kernels.schedule import schedule
from dspark.kernels.schedule.reference import survival


class Mode(enum.Enum):
    STATIC = "static"  # verify every draft
    SCHEDULED = "scheduled"  # verify what the budget admits
    CAP_ACCEPT = "cap-accept"  # verify every draft, accept only what the budget admits


class VerifyRows(NamedTuple):
    """Rows of each request, the one of the last emitted token included; i32 [R]."""

    run: torch.Tensor  # rows the target runs; the rest of the verify width is padding
    acceptable: torch.Tensor  # rows that may be accepted, 1..run


def best_budget(chance: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    """Draft rows K that maximise expected tokens per second: (R + sum of the K largest) * rate.

    Args:
        chance: f32 [R, depth] survival of each draft, estimated without looking at it.
        rate: f64 [B + 1] steps per second of a target forward of b rows; clamped at its end.

    Returns:
        i32 [1]; the smaller K where two are equal.
    """
    requests = chance.shape[0]
    gain = torch.sort(chance.double().flatten(), descending=True).values
    tokens = requests + torch.cat([gain.new_zeros(1), gain.cumsum(0)])
    rows = requests + torch.arange(tokens.shape[0], device=chance.device)
    speed = tokens * rate[rows.clamp(max=rate.shape[0] - 1)]
    return speed.argmax().to(torch.int32)[None]


class VerifyScheduler:
    """Verify rows of each step, and the confidences remembered for the next budget.

    Args:
        mode: see `Mode`.
        gamma: drafts per block. depth: drafts that may be verified, <= gamma.
        slots: request slots. Confidences are kept by slot; a new owner starts with survival 1.
        rate: steps per second by rows (`dspark.speculation.step_cost`), None = verify everything.
    """

    def __init__(
        self,
        mode: Mode,
        gamma: int,
        depth: int,
        slots: int,
        rate: torch.Tensor | None,
        device: torch.device | str,
    ):
        self.mode, self.depth = mode, depth
        self.rate = None if rate is None else rate.to(device)
        self.remembered = torch.ones(slots, gamma, device=device)
        self.forced_rows: int | None = None  # a fixed budget, for measurements
        self.forced_share: float | None = None  # of all drafts, for measurements

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
        if self.rate is None:
            return None
        return best_budget(survival(earlier)[:, : self.depth], self.rate)
