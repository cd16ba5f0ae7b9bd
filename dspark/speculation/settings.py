"""What an operator can set about speculation beyond SGLang's own flags (`dspark.options`)."""

import os
from typing import Any, NamedTuple

import torch

from dspark import options
from dspark.errors import UsageError
from dspark.speculation import calibration as calibrations
from dspark.speculation import forced_drafts, step_cost
from dspark.speculation.budget import Mode, VerifyScheduler
from dspark.speculation.calibration import SampleFile
from dspark.speculation.online_calibration import OnlineCalibration


class Settings(NamedTuple):
    gamma: int
    mode: Mode
    cost: step_cost.StepCost | None
    calibration: calibrations.Calibration | None
    budget: int | None
    clear_rejected: bool
    samples: SampleFile | None

    @classmethod
    def from_environment(cls, gamma: int) -> "Settings":
        """Raises UsageError naming the flag or variable that cannot be used."""
        made = cls(
            gamma,
            _mode(os.environ.get("DSPARK_VERIFY", "static")),
            _table("DSPARK_STEP_COST", step_cost.load),
            _table("DSPARK_CALIBRATION", lambda file: calibrations.load(file, gamma)),
            _count("DSPARK_VERIFY_BUDGET"),
            os.environ.get("DSPARK_KEEP_REJECTED", "0") != "1",
            _table("DSPARK_SAMPLES", SampleFile),
        )
        if made.samples is not None and made.mode is not Mode.STATIC:
            raise UsageError(
                f"{options.name('DSPARK_SAMPLES')} collects outcomes of all drafts and cannot be "
                f"used with {options.setting('DSPARK_VERIFY')}: drafts that are not verified would "
                "bias them."
            )
        return made

    @property
    def measures_steps(self) -> bool:
        """Whether the server is to find out by itself what its steps cost."""
        decided = self.cost is not None or self.budget is not None
        forced = os.environ.get(forced_drafts.VARIABLE) == "1"  # they say nothing of the model's
        return self.mode is not Mode.STATIC and not decided and not forced

    def scheduler(self, depth: int, slots: int, device: torch.device | str) -> VerifyScheduler:
        made = VerifyScheduler(self.mode, self.gamma, depth, slots, self.cost, device)
        made.forced_rows = self.budget
        return made

    def online_calibration(self, device: torch.device | str) -> OnlineCalibration | None:
        """None where confidences decide nothing."""
        return None if self.mode is Mode.STATIC else OnlineCalibration(self.gamma, device)

    def confidence_temperatures(self, device: torch.device | str) -> torch.Tensor:
        """f32 [gamma]."""
        values = self.calibration.temperatures if self.calibration else [1.0] * self.gamma
        return torch.tensor(values, dtype=torch.float32, device=device)

    def report(self) -> dict[str, Any]:
        return {
            "verify_mode": self.mode.value,
            "verify_budget": self.budget,
            "calibrated": self.calibration is not None,
            "clears_rejected_state": self.clear_rejected,
        }


def _mode(name: str) -> Mode:
    try:
        return Mode(name)
    except ValueError:
        known = ", ".join(mode.value for mode in Mode)
        raise UsageError(f"{options.setting('DSPARK_VERIFY')} is none of {known}.") from None


def _table(variable: str, load: Any) -> Any:
    file = os.environ.get(variable)
    if not file:
        return None
    try:
        return load(file)
    except step_cost.TableError as error:
        raise UsageError(f"{options.name(variable)}: {error}") from None


def _count(variable: str) -> int | None:
    text = os.environ.get(variable)
    if not text:
        return None
    if not text.isdigit():
        raise UsageError(f"{options.setting(variable)} must be a number of draft rows, 0 or more.")
    return int(text)
