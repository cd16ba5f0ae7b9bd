"""What a decode step costs by its requests and rows: the table the verify budget is chosen by.

JSON: `{"steps": [{"requests": 4, "rows": [4, 8, ...], "milliseconds": [...]}, ...]}`. `rows` are
the target's rows of the whole batch, `milliseconds` those of a whole step, its draft included. For
one number of requests more rows never take less time: noise of the measurement that says otherwise
is averaged away. Between two measured steps the cost is taken to grow evenly. `without_draft` may
give the milliseconds of a step that runs one row a request and no draft, the least of all.
"""

import bisect
import enum
import json
import statistics
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

OLD_FORMAT = "sample_batch_tokens"  # by rows alone


class TableError(ValueError):
    """A cost table or calibration that cannot be used; the message is one sentence."""


class Source(enum.Enum):
    """Where a server has its table from, as `/server_info` says it."""

    NONE = None  # no table, and no use for one
    GIVEN = "given"
    KEPT = "measured at an earlier start"
    MEASURED = "measured at start"
    WANTED = "not measured"


class Sample(NamedTuple):
    """One measured step."""

    requests: int
    rows: int
    seconds: float
    drafted: bool = True


class Steps(NamedTuple):
    """Steps of one number of requests."""

    requests: int
    rows: tuple[int, ...]  # strictly increasing, at least `requests`
    seconds: tuple[float, ...]  # never decreasing
    without_draft: float | None = None  # seconds, at most those of the fewest rows


StepCost = tuple[Steps, ...]  # requests strictly increase


def from_samples(samples: Iterable[Sample]) -> StepCost:
    """Table from measured steps: medians, then the nearest costs that never decrease.

    Raises:
        TableError: no samples with a draft, or a time that is not positive.
    """
    times: dict[int, dict[int, list[float]]] = {}
    for requests, rows, seconds, drafted in samples:
        if seconds <= 0:
            raise TableError("A step that takes no time cannot be part of a cost table.")
        times.setdefault(requests, {}).setdefault(rows if drafted else 0, []).append(seconds)
    complete = {requests: by_rows for requests, by_rows in times.items() if set(by_rows) != {0}}
    if not complete:
        raise TableError("A cost table needs at least one measured step.")
    return tuple(_steps(requests, by_rows) for requests, by_rows in sorted(complete.items()))


def _steps(requests: int, by_rows: dict[int, list[float]]) -> Steps:
    """by_rows: seconds of the measured steps; those of 0 rows ran no draft."""
    rows = sorted(by_rows)
    medians = [statistics.median(by_rows[n]) for n in rows]
    seconds = isotonic(medians, [len(by_rows[n]) for n in rows])
    if rows[0] == 0:
        return Steps(requests, tuple(rows[1:]), tuple(seconds[1:]), seconds[0])
    return Steps(requests, tuple(rows), tuple(seconds))


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The never decreasing values that are nearest in weighted least squares."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length; means increase
    for value, weight in zip(values, weights, strict=True):
        block = (value, float(weight), 1)
        while blocks and blocks[-1][0] >= block[0]:
            mean, before, length = blocks.pop()
            total = before + block[1]
            block = ((mean * before + block[0] * block[1]) / total, total, length + block[2])
        blocks.append(block)
    return [mean for mean, _, length in blocks for _ in range(length)]


def seconds_by_budget(cost: StepCost, requests: int, depth: int) -> list[float]:
    """Seconds of a step of `requests` that verifies 0, 1, ... requests * depth drafts.

    Sizes of a batch are compared at equal drafts a request. Above the largest measured batch the
    cost grows as between the two largest; a request with more drafts than were measured costs what
    the most measured do.
    """
    low, high, share = _neighbours(cost, requests)
    found = [
        _grown(_at(low, drafts), _at(high, drafts), share)
        for drafts in (k / requests for k in range(requests * depth + 1))
    ]
    # Beyond the table the difference of two measured sizes could fall with the drafts.
    return list(accumulate(found, max))


def seconds_without_draft(cost: StepCost, requests: int) -> float | None:
    """Seconds of a step of `requests` that drafts nothing; None where the table does not know."""
    low, high, share = _neighbours(cost, requests)
    if low.without_draft is None or high.without_draft is None:
        return None
    least = seconds_by_budget(cost, requests, 0)[0]
    return min(_grown(low.without_draft, high.without_draft, share), least)


def _neighbours(cost: StepCost, requests: int) -> tuple[Steps, Steps, float]:
    """Two measured sizes, and where `requests` stands between (0..1) or beyond them (> 1)."""
    sizes = [steps.requests for steps in cost]
    if len(sizes) == 1:
        return cost[0], cost[0], 0.0
    upper = min(max(bisect.bisect_left(sizes, requests), 1), len(sizes) - 1)
    low, high = cost[upper - 1], cost[upper]
    return low, high, max(0.0, (requests - low.requests) / (high.requests - low.requests))


def _grown(below: float, above: float, share: float) -> float:
    grown = below + share * (above - below)
    return grown if share <= 1 else max(grown, above)


def _at(steps: Steps, drafts: float) -> float:
    """Seconds of a step with so many drafts a request, between the measured ones on a line."""
    rows = steps.requests * (1 + drafts)
    i = bisect.bisect_left(steps.rows, rows)
    if i == 0:
        return steps.seconds[0]
    if i == len(steps.rows):
        return steps.seconds[-1]
    (left, right), (less, more) = steps.rows[i - 1 : i + 1], steps.seconds[i - 1 : i + 1]
    return less + (rows - left) / (right - left) * (more - less)


def save(cost: StepCost, file: str | Path) -> None:
    Path(file).write_text(json.dumps(as_json(cost), indent=1) + "\n")


def as_json(cost: StepCost) -> dict[str, Any]:
    return {"steps": [_steps_as_json(steps) for steps in cost]}


def _steps_as_json(steps: Steps) -> dict[str, Any]:
    found: dict[str, Any] = {
        "requests": steps.requests,
        "rows": list(steps.rows),
        "milliseconds": [round(1000 * s, 3) for s in steps.seconds],
    }
    if steps.without_draft is not None:
        found["without_draft"] = round(1000 * steps.without_draft, 3)
    return found


def load(file: str | Path) -> StepCost:
    """Raises TableError."""
    try:
        content = json.loads(Path(file).read_text())
    except OSError as error:
        raise TableError(f"Cannot read {file}: {error.strerror}.") from error
    except ValueError as error:
        raise TableError(f"{file} is not a step cost table: {error!r}.") from error
    return from_json(content, file)


def from_json(content: Any, file: str | Path) -> StepCost:
    """Raises TableError, which names `file`."""
    if isinstance(content, dict) and OLD_FORMAT in content:
        raise TableError(
            f"{file} is a table by rows alone, which mixes batches of different sizes; measure "
            "again with dspark profile-steps."
        )
    try:
        cost = tuple(
            Steps(
                int(steps["requests"]),
                tuple(int(n) for n in steps["rows"]),
                tuple(float(ms) / 1000 for ms in steps["milliseconds"]),
                None if (ms := steps.get("without_draft")) is None else float(ms) / 1000,
            )
            for steps in content["steps"]
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TableError(f"{file} is not a step cost table: {error!r}.") from error
    if not cost or any(b.requests <= a.requests for a, b in pairwise(cost)):
        raise TableError(f"{file}: the requests of its steps must strictly increase.")
    for steps in cost:
        _check(steps, file)
    return cost


def _check(steps: Steps, file: str | Path) -> None:
    requests, rows, seconds, without_draft = steps
    where = f"{file}, {requests} requests"
    if requests < 1 or not rows or len(rows) != len(seconds):
        raise TableError(f"{where}: one positive time is needed for each number of rows.")
    if rows[0] < requests or any(b <= a for a, b in pairwise(rows)):
        raise TableError(f"{where}: rows must strictly increase, from one a request on.")
    if seconds[0] <= 0 or any(b < a for a, b in pairwise(seconds)):
        raise TableError(f"{where}: milliseconds must be positive and never decrease.")
    if without_draft is not None and not 0 < without_draft <= seconds[0]:
        raise TableError(f"{where}: a step without a draft must take less than any other.")
