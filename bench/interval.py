"""95 % interval of a ratio measured in pairs."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

# Two-sided 95 % quantiles of Student's t for 1..30 degrees of freedom; beyond, the normal's.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
NORMAL_975 = 1.960


class Ratio(NamedTuple):
    """Geometric mean of b/a over pairs, with its two-sided 95 % t interval."""

    geomean: float
    low: float
    high: float
    pairs: int

    def differs_from_one(self) -> bool:
        return self.low > 1.0 or self.high < 1.0


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """a[i] and b[i] were measured back to back.

    Raises:
        ValueError: fewer than two pairs, unequal counts, or a figure that is not positive.
    """
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"need at least two pairs, got {len(a)} and {len(b)} figures")
    if min(*a, *b) <= 0:
        raise ValueError("figures must be positive")
    logs = [math.log(y / x) for x, y in zip(a, b, strict=True)]
    freedom = len(logs) - 1
    quantile = T_975[freedom - 1] if freedom <= len(T_975) else NORMAL_975
    margin = quantile * stdev(logs) / math.sqrt(len(logs))
    centre = fmean(logs)
    return Ratio(math.exp(centre), math.exp(centre - margin), math.exp(centre + margin), len(logs))
