"""One figure from many rounds."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any


def median_levels(record: Mapping[str, Any], arm: str) -> list[dict[str, Any]]:
    """Levels of an arm of a `pair` record, every figure the median of its rounds."""
    rounds = [one["levels"][arm] for one in record["rounds"]]
    return [median_figures(levels) for levels in zip(*rounds, strict=True)]


def median_figures(levels: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Field by field, lists and percentiles element by element; None where most are unknown."""
    return {name: _median([level[name] for level in levels]) for name in levels[0]}


def _median(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    # A figure that only slow rounds could give would be no median of all.
    if 2 * len(known) <= len(values):
        return None
    if isinstance(known[0], Mapping):
        shared = [v for v in known if v.keys() == known[0].keys()]
        return {key: _median([v[key] for v in shared]) for key in known[0]}
    if isinstance(known[0], list):
        return [median(column) for column in zip(*known, strict=False)]
    middle = median(known)
    return int(middle) if isinstance(known[0], int) else middle
