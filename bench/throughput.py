"""From traces to figures. Three throughputs, kept apart because they answer different questions.

* scheduler output: what the server says of itself;
* decode window: tokens while every request was decoding, which is the steady state;
* end to end: all tokens over all time, prefill and stragglers included, which is what one pays for.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from dspark.bench.client import Trace

Percentiles = dict[str, float]  # "p50", "p90", "p99" -> seconds


class Window(NamedTuple):
    tokens: int
    seconds: float


class Figures(NamedTuple):
    """One concurrency level. Throughputs in tokens/s, times in seconds; None = not measurable."""

    concurrency: int
    tokens: int
    scheduler_output: float | None
    decode_window: float | None
    end_to_end: float
    accepted_length: float | None  # tokens per verify step
    acceptance_by_position: list[float]  # share of verify steps that accepted at least k drafts
    step_time: float | None  # of one decode or verify step, median over requests
    ttft: Percentiles
    itl: Percentiles


THROUGHPUTS = ("scheduler_output", "decode_window", "end_to_end")


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the closest ranks (NumPy's default). ValueError if empty."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(values: Sequence[float]) -> Percentiles:
    return {f"p{p}": percentile(values, p / 100) for p in (50, 90, 99)} if values else {}


def decode_window(traces: Sequence[Trace]) -> Window | None:
    """From the last first token to the first finish; None when some request ended before that."""
    begin = max(trace.first_token for trace in traces)
    end = min(trace.steps[-1].at for trace in traces)
    if end <= begin:
        return None
    tokens = sum(trace.tokens_at(end) - trace.tokens_at(begin) for trace in traces)
    return Window(tokens, end - begin)


def end_to_end(traces: Sequence[Trace], release: float) -> Window:
    """All tokens from the release of the clients to the last finish."""
    return Window(sum(t.tokens for t in traces), max(t.end for t in traces) - release)


def inter_token_times(trace: Trace) -> list[float]:
    """Seconds per token: a step of k tokens gives k times a k-th of its time."""
    times = []
    for before, after in pairwise(trace.steps):
        produced = after.tokens - before.tokens
        times += [(after.at - before.at) / produced] * produced
    return times


def decode_steps(trace: Trace) -> int:
    """Verify steps where the server reports them, else steps of the stream."""
    return len(trace.steps) - 1 if trace.verify_steps is None else trace.verify_steps


def step_time(trace: Trace) -> float | None:
    steps = decode_steps(trace)
    return (trace.steps[-1].at - trace.first_token) / steps if steps else None


def accepted_length(traces: Sequence[Trace]) -> float | None:
    """Tokens per verify step, the first token of each request (from prefill) not counted."""
    verified = [t for t in traces if t.verify_steps]
    if not verified:
        return None
    return sum(t.tokens - 1 for t in verified) / sum(t.verify_steps or 0 for t in verified)


def acceptance_by_position(traces: Sequence[Trace]) -> list[float]:
    depth = max((len(t.accepted) for t in traces), default=0)
    counts = [sum(t.accepted[k] for t in traces if k < len(t.accepted)) for k in range(depth)]
    steps = sum(counts)
    return [sum(counts[k:]) / steps for k in range(1, depth)] if steps else []


def summarise(traces: Sequence[Trace], release: float, samples: Sequence[float]) -> Figures:
    """Figures of one run; `samples`: the server's own tokens/s figures during it."""
    window = decode_window(traces)
    total = end_to_end(traces, release)
    steps = [time for time in map(step_time, traces) if time is not None]
    return Figures(
        concurrency=len(traces),
        tokens=total.tokens,
        scheduler_output=median(samples) if samples else None,
        decode_window=window.tokens / window.seconds if window else None,
        end_to_end=total.tokens / total.seconds,
        accepted_length=accepted_length(traces),
        acceptance_by_position=acceptance_by_position(traces),
        step_time=median(steps) if steps else None,
        ttft=percentiles([t.first_token - t.start for t in traces]),
        itl=percentiles([time for t in traces for time in inter_token_times(t)]),
    )


def scaling(figures: Figures, single: Figures | None) -> dict[str, float | None]:
    """Each throughput as a share of linear scaling: value / (C x value at C1)."""

    def share(name: str) -> float | None:
        value = getattr(figures, name)
        reference = getattr(single, name) if single is not None else None
        return value / (figures.concurrency * reference) if value and reference else None

    return {name: share(name) for name in THROUGHPUTS}
