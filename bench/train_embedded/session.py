"""What both training phases share: device, compilation, progress against a budget, resuming."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dspark.bench.train_embedded.linear import Numerics
from dspark.bench.train_embedded.optimise import Optimiser
from dspark.bench.train_embedded.store import load_state, save_state

Weights = dict[str, torch.Tensor]
BALANCE_RATE = 2e-3  # step of the routing bias towards experts with less than their share


class Budget(NamedTuple):
    """A run ends after `steps` (reproducible) or, without them, after `minutes`."""

    minutes: float
    steps: int | None


class Progress:
    """Fraction of the budget used. Compilation (the first step) takes from the time, not from it.

    A resumed run continues the schedule where it stopped, with the remaining time as its budget.
    """

    def __init__(self, budget: Budget, fraction: float = 0.0, step: int = 0):
        self._budget, self._resumed_at, self.step = budget, fraction, step
        self._begin = time.monotonic()
        self._measured_from: float | None = None

    def __call__(self) -> float:
        if self._budget.steps is not None:
            return min(1.0, self.step / self._budget.steps)
        if self._measured_from is None:
            return self._resumed_at
        end = self._begin + 60 * self._budget.minutes
        left = max(1e-9, end - self._measured_from)
        fraction = min(1.0, (time.monotonic() - self._measured_from) / left)
        return self._resumed_at + (1 - self._resumed_at) * fraction

    def advance(self) -> None:
        self.step += 1
        if self._measured_from is None:
            self._measured_from = time.monotonic()


def pick_device() -> tuple[torch.device, Numerics]:
    """CUDA in bf16 with TF32 for the f32 products, else the CPU in f32; both with rounding."""
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
        return torch.device("cuda"), Numerics(torch.bfloat16, rounding=True)
    return torch.device("cpu"), Numerics(torch.float32, rounding=True)


def compiled(function: Callable, device: torch.device, wanted: bool) -> Callable:
    """torch.compile on CUDA; falls back to the plain function, and says so, if that fails."""
    if not wanted or device.type != "cuda":
        return function
    torch._dynamo.config.recompile_limit = 64
    fast = torch.compile(function, dynamic=False)
    broken = False

    def call(*args: Any) -> Any:
        nonlocal broken
        if not broken:
            try:
                return fast(*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                broken = True
                print(f"Compilation failed, continuing uncompiled: {error!r:.600}", flush=True)
        return function(*args)

    return call


def balance(biases: list[torch.Tensor], loads: list[torch.Tensor]) -> None:
    """Move each routing bias f32 [E] a step towards equal load."""
    with torch.no_grad():
        for bias, load in zip(biases, loads, strict=True):
            bias += BALANCE_RATE * torch.sign(load.mean() - load)


def checkpoint(file: Path, weights: Weights, optimiser: Optimiser, progress: Progress) -> None:
    save_state(
        file,
        {
            "weights": {n: w.detach() for n, w in weights.items()},
            "optimiser": optimiser.state_dict(),
            "fraction": progress(),
            "step": progress.step,
        },
    )


def restore(
    file: Path, weights: Weights, optimiser: Optimiser, budget: Budget, device: torch.device
) -> Progress:
    """Continue from a checkpoint if there is one: fills weights and optimiser in place."""
    state = load_state(file, device)
    if state is None:
        return Progress(budget)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(state["weights"][name])
    optimiser.load_state_dict(state["optimiser"])
    print(f"Resuming {file.name} at step {state['step']}.", flush=True)
    return Progress(budget, state["fraction"], state["step"])


def step_generator(seed: int, step: int, device: torch.device) -> torch.Generator:
    """Random choices of one step: the same after resuming as without a stop."""
    return torch.Generator(device).manual_seed(seed * 1_000_003 + step)
