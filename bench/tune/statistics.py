"""From paired times to a verdict. Pure Python, so that anyone can recompute it from the raw file.

A sample is d = ln(t_incumbent / t_candidate) of one pair: drift that both arms share cancels, and
d > 0 means the candidate was faster. Cases count equally, however many pairs each has.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from dspark.bench.tune.schedule import generator

CONFIDENCE = 0.95
RESAMPLES = 10_000
MIN_PAIRS_FOR_T = 8

# One-sided 95 % quantiles of Student's t for 1..30 degrees of freedom; beyond, the normal's.
T_95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812,
    1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725,
    1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697,
)  # fmt: skip
NORMAL_95 = 1.645


class Gates(NamedTuple):
    """All must hold before a configuration replaces the incumbent."""

    geomean_min: float = 1.02
    ci_low_min: float = 1.00
    worst_min: float = 0.98


class Worst(NamedTuple):
    case: str
    speedup: float


class Comparison(NamedTuple):
    """Speed-ups of a candidate over the incumbent; 1.0 = equal."""

    geomean: float
    ci_low: float  # one-sided 95 % lower bound of the geometric mean
    ci_high: float  # one-sided 95 % upper bound: with `ci_low` a 90 % interval
    ci_method: str  # "bootstrap" or "t", whichever bound was lower
    worst: Worst
    per_case: dict[str, float]

    def passes(self, gates: Gates) -> bool:
        return (
            self.geomean >= gates.geomean_min
            and self.ci_low > gates.ci_low_min
            and self.worst.speedup >= gates.worst_min
        )

    def excludes_one(self) -> bool:
        """Whether a difference is established in either direction (the AA control must not)."""
        return self.ci_low > 1.0 or self.ci_high < 1.0


Samples = Mapping[str, Sequence[float]]  # case -> d of every pair


def log_ratio(incumbent_ms: float, candidate_ms: float) -> float:
    """ValueError for a time that is not positive."""
    if not (incumbent_ms > 0 and candidate_ms > 0):
        raise ValueError(f"times must be positive, got {incumbent_ms} and {candidate_ms} ms")
    return math.log(incumbent_ms / candidate_ms)


def compare(samples: Samples, seed: int) -> Comparison:
    """Summarise the pairs of one candidate. ValueError without a pair in every case."""
    if not samples or not all(samples.values()):
        raise ValueError("every case needs at least one pair")
    means = {case: fmean(values) for case, values in samples.items()}
    centre = fmean(means.values())
    low, high = bootstrap_bounds(samples, seed)
    method = "bootstrap"
    if len(samples) > 1 and all(len(v) >= MIN_PAIRS_FOR_T for v in samples.values()):
        margin = t_margin(list(means.values()))
        if centre - margin < low:
            low, method = centre - margin, "t"
        high = max(high, centre + margin)
    slowest = min(means, key=means.__getitem__)
    return Comparison(
        geomean=math.exp(centre),
        ci_low=math.exp(low),
        ci_high=math.exp(high),
        ci_method=method,
        worst=Worst(slowest, math.exp(means[slowest])),
        per_case={case: math.exp(mean) for case, mean in means.items()},
    )


def bootstrap_bounds(samples: Samples, seed: int) -> tuple[float, float]:
    """5th and 95th percentile of the mean of case means, pairs resampled within each case."""
    rng = generator(seed, "bootstrap")
    groups = list(samples.values())
    centres = sorted(
        fmean(fmean(rng.choices(values, k=len(values))) for values in groups)
        for _ in range(RESAMPLES)
    )
    tail = round((1 - CONFIDENCE) * RESAMPLES)
    return centres[tail], centres[-tail - 1]


def t_margin(case_means: list[float]) -> float:
    """Half-width of the one-sided t interval over case means."""
    freedom = len(case_means) - 1
    quantile = T_95[freedom - 1] if freedom <= len(T_95) else NORMAL_95
    return quantile * stdev(case_means) / math.sqrt(len(case_means))


class Verdict(NamedTuple):
    status: str  # "winner" | "no_improvement" | "invalid_noise"
    winner: str | None


def judge(
    control: Comparison, candidates: Mapping[str, Comparison | None], gates: Gates
) -> Verdict:
    """Choose among candidates by the highest lower bound, not the highest mean.

    Args:
        control: the incumbent against itself; if that shows a difference, nothing can be said.
        candidates: by id; None = rejected before timing (parity or resources).
    """
    if control.excludes_one():
        return Verdict("invalid_noise", None)
    passing = {c: r for c, r in candidates.items() if r is not None and r.passes(gates)}
    if not passing:
        return Verdict("no_improvement", None)
    return Verdict("winner", max(passing, key=lambda c: passing[c].ci_low))
