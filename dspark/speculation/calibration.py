"""Calibration of the confidence head: one temperature per draft position (sequential scaling).

JSON: `{"temperatures": [...], "dataset": "...", "num_samples": n, "ece_before": [...],
"ece_after": [...]}`. The confidence of draft k is sigmoid(logit / temperatures[k]).
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch

from dspark.speculation.step_cost import TableError

BINS = 15
GRID = torch.logspace(-1, 1, 41, dtype=torch.float64)  # 0.1 .. 10


class Calibration(NamedTuple):
    temperatures: tuple[float, ...]  # one per draft position
    dataset: str
    num_samples: int
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]


def expected_calibration_error(predicted: torch.Tensor, happened: torch.Tensor) -> float:
    """Mean gap between predicted and observed frequency over 15 equal bins, weighted by size.

    predicted: f64 [n] in [0, 1]. happened: bool [n].
    """
    bin_of = (predicted * BINS).long().clamp(0, BINS - 1)
    gap = torch.zeros(BINS, dtype=torch.float64)
    gap.index_add_(0, bin_of, predicted.double() - happened.double())
    return float(gap.abs().sum() / len(predicted))


def fit(logits: torch.Tensor, accepted: torch.Tensor, dataset: str) -> Calibration:
    """Temperatures fitted left to right, each with the earlier ones frozen.

    T_k minimises the calibration error of "drafts 0..k are all accepted", predicted by the
    product of the confidences so far; the smaller change wins where two are equal.

    Args:
        logits: f32 [n, gamma] raw confidence logits of blocks that were verified in full.
        accepted: int [n] drafts accepted of each block.

    Raises:
        TableError: no samples.
    """
    if len(logits) == 0:
        raise TableError("Calibration needs at least one verified block.")
    z = logits.double()
    product = torch.ones(len(z), dtype=torch.float64)
    plain = product.clone()
    temperatures, before, after = [], [], []
    for k in range(z.shape[1]):
        happened = accepted > k
        plain = plain * torch.sigmoid(z[:, k])
        before.append(expected_calibration_error(plain, happened))
        tried = [
            (expected_calibration_error(product * torch.sigmoid(z[:, k] / t), happened), t)
            for t in GRID.tolist()
        ]
        error, best = min(tried, key=lambda pair: (pair[0], abs(torch.tensor(pair[1]).log())))
        product = product * torch.sigmoid(z[:, k] / best)
        temperatures.append(best)
        after.append(error)
    return Calibration(tuple(temperatures), dataset, len(z), tuple(before), tuple(after))


def save(calibration: Calibration, file: str | Path) -> None:
    Path(file).write_text(json.dumps(calibration._asdict(), indent=1) + "\n")


def load(file: str | Path, gamma: int) -> Calibration:
    """Raises TableError: unreadable, of another block size, or with a temperature <= 0."""
    try:
        content = json.loads(Path(file).read_text())
        loaded = Calibration(
            tuple(float(t) for t in content["temperatures"]),
            str(content["dataset"]),
            int(content["num_samples"]),
            tuple(content["ece_before"]),
            tuple(content["ece_after"]),
        )
    except OSError as error:
        raise TableError(f"Cannot read {file}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise TableError(f"{file} is not a calibration: {error!r}.") from error
    if len(loaded.temperatures) != gamma:
        raise TableError(
            f"{file} calibrates {len(loaded.temperatures)} draft positions, but the draft "
            f"proposes {gamma}."
        )
    if min(loaded.temperatures) <= 0:
        raise TableError(f"{file} holds a temperature that is not positive.")
    return loaded


class SampleFile:
    """Confidence logits and outcomes of verified blocks, one JSON list a line: [[z...], accepted].

    Only for collecting: it waits for the device in every step.
    """

    def __init__(self, file: str | Path):
        self._file = Path(file)

    def add(self, logits: torch.Tensor, accepted: torch.Tensor) -> None:
        """logits: f32 [R, gamma]. accepted: i32 [R]."""
        with self._file.open("a") as out:
            for z, count in zip(logits.tolist(), accepted.tolist(), strict=True):
                out.write(json.dumps([z, count]) + "\n")


def read_samples(file: str | Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(f64 [n, gamma], i64 [n]) of a `SampleFile`. Raises TableError."""
    try:
        lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
        logits = torch.tensor([z for z, _ in lines], dtype=torch.float64)
        return logits, torch.tensor([count for _, count in lines])
    except OSError as error:
        raise TableError(f"Cannot read {file}: {error.strerror}.") from error
    except (ValueError, TypeError) as error:
        raise TableError(f"{file} holds no confidence samples: {error}.") from error
