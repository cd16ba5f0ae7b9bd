"""What a target forward costs by its number of rows: the table the verify budget is chosen by.

JSON: `{"sample_batch_tokens": [...], "sample_steps_per_sec": [...], "max_batch_tokens": n}`.
Row counts strictly increase; between two of them the lower one holds, outside the range the
nearest. A step with more rows is never taken to be faster.
"""

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch


class TableError(ValueError):
    """A cost table or calibration that cannot be used; the message is one sentence."""


class StepCost(NamedTuple):
    rows: tuple[int, ...]  # strictly increasing
    steps_per_second: tuple[float, ...]  # never increasing
    max_rows: int


def from_samples(seconds: Mapping[int, Sequence[float]]) -> StepCost:
    """Table from measured step times.

    Args:
        seconds: rows -> step times in seconds; the median of each counts.

    Raises:
        TableError: no samples, or a time that is not positive.
    """
    if not seconds or any(not times or min(times) <= 0 for times in seconds.values()):
        raise TableError("A cost table needs at least one positive step time per row count.")
    rows = tuple(sorted(seconds))
    slowest, rates = 0.0, []
    for count in rows:
        slowest = max(slowest, statistics.median(seconds[count]))
        rates.append(1 / slowest)
    return StepCost(rows, tuple(rates), rows[-1])


def save(cost: StepCost, file: str | Path) -> None:
    content = {
        "sample_batch_tokens": list(cost.rows),
        "sample_steps_per_sec": list(cost.steps_per_second),
        "max_batch_tokens": cost.max_rows,
    }
    Path(file).write_text(json.dumps(content, indent=1) + "\n")


def load(file: str | Path) -> StepCost:
    """Raises TableError."""
    try:
        content = json.loads(Path(file).read_text())
        rows = tuple(int(n) for n in content["sample_batch_tokens"])
        rates = tuple(float(x) for x in content["sample_steps_per_sec"])
        largest = int(content["max_batch_tokens"])
    except OSError as error:
        raise TableError(f"Cannot read {file}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise TableError(f"{file} is not a step cost table: {error!r}.") from error
    if not rows or len(rows) != len(rates):
        raise TableError(f"{file} needs one step rate for each of its row counts.")
    if rows[0] < 1 or any(b <= a for a, b in itertools.pairwise(rows)):
        raise TableError(f"{file}: sample_batch_tokens must be positive and strictly increase.")
    if min(rates) <= 0 or any(b > a for a, b in itertools.pairwise(rates)):
        raise TableError(f"{file}: sample_steps_per_sec must be positive and never increase.")
    if largest < rows[-1]:
        raise TableError(f"{file}: max_batch_tokens is below the largest sample.")
    return StepCost(rows, rates, largest)


def rate_table(cost: StepCost) -> torch.Tensor:
    """f64 [max_rows + 1] steps per second of a forward of b rows, by the rules of this module."""
    count = torch.arange(cost.max_rows + 1)
    index = torch.searchsorted(torch.tensor(cost.rows), count, right=True) - 1
    return torch.tensor(cost.steps_per_second, dtype=torch.float64)[index.clamp(min=0)]
