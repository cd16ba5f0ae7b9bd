"""What an operator sees of speculation: acceptance by position, and a warning when it is stuck."""

import logging
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)

STUCK_STEPS = 200


class AcceptanceMonitor:
    """Host-side counters, fed with results that are on the host anyway.

    Acceptance of exactly nothing, or of every draft, for 200 steps in a row is more often a fault
    than a text: a broken draft, or a target that repeats itself.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.steps = 0  # verify steps, one per request
        self.rows = 0  # of the target that these steps ran
        self.reached = [0] * depth  # how often draft k was accepted and delivered
        self._stuck_at: int | None = None
        self._stuck_for = 0
        self.warning: str | None = None

    def record(self, accepted: Sequence[int], rows: Sequence[int]) -> None:
        """One step's requests; none for a step of nobody.

        Args:
            accepted: drafts delivered of each. rows: target rows run of each, 1..depth + 1.
        """
        if not accepted:
            return
        self.steps += len(accepted)
        self.rows += sum(rows)
        for count in accepted:
            for k in range(count):
                self.reached[k] += 1
        self._watch([count for count, run in zip(accepted, rows, strict=True) if run > 1])

    def _watch(self, accepted: Sequence[int]) -> None:
        """accepted: of the requests whose drafts were tried at all."""
        value = accepted[0] if len(set(accepted)) == 1 else None
        if value not in (0, self.depth):
            value = None
        if value is None or value != self._stuck_at:
            self._stuck_at, self._stuck_for, self.warning = value, 0, None
        if value is None:
            return
        self._stuck_for += 1
        if self._stuck_for == STUCK_STEPS:
            what = "no draft" if value == 0 else f"all {self.depth} drafts"
            self.warning = f"{what} accepted in each of the last {STUCK_STEPS} steps"
            logger.warning("DSpark acceptance is stuck: %s.", self.warning)

    def report(self) -> dict[str, Any]:
        accepted = sum(self.reached)
        return {
            "verify_steps": self.steps,
            "verify_rows_run": self.rows,
            "verify_rows_saved": self.steps * (self.depth + 1) - self.rows,
            "mean_accepted_length": 1 + accepted / self.steps if self.steps else None,
            "acceptance_per_position": [
                n / self.steps if self.steps else None for n in self.reached
            ],
            "stuck_steps": self._stuck_for,
            "warning": self.warning,
        }
