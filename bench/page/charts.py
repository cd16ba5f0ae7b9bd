"""Where the marks of a chart stand, in units of its view box; the template draws them."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dspark.bench.interval import Ratio

WIDTH, HEIGHT = 640.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 48.0, 8.0, 10.0, 26.0  # margins, for the ticks' text
ROW = 26.0  # height of one interval
NAMES = 190.0  # width of the intervals' names
GAP = 0.3  # of a group's width
TICKS = 5  # most steps of an axis


class Tick(NamedTuple):
    at: float
    text: str


class Bar(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    series: int
    says: str  # shown under the pointer


class Bars(NamedTuple):
    title: str
    series: list[str]
    bars: list[Bar]
    values: list[Tick]  # of the upward axis
    groups: list[Tick]


class Interval(NamedTuple):
    y: float
    low: float
    middle: float
    high: float
    name: str
    says: str


class Intervals(NamedTuple):
    title: str
    height: float
    intervals: list[Interval]
    values: list[Tick]
    one: float  # where the ratio 1 stands


def step_of(span: float) -> float:
    """The smallest of 1, 2, 5 x 10^n that divides `span` > 0 into at most TICKS steps."""
    power = 10.0 ** math.floor(math.log10(span / TICKS))
    return next(m * power for m in (1, 2, 5, 10) if m * power * TICKS >= span * (1 - 1e-9))


def ticks(low: float, high: float) -> list[float]:
    """Multiples of one step; the first is at most `low`, the last at least `high`."""
    step = step_of(high - low)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def bars(
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    unit: str,
    highest: float | None = None,
) -> Bars | None:
    """Bars from zero, side by side in each group.

    Args:
        series: name -> a figure >= 0 for each group; no bar for None or for groups it lacks.
        highest: of the axis; by default what the figures need.

    Returns:
        None without any figure above zero.
    """
    known = [value for figures in series.values() for value in figures if value is not None]
    top = highest or max(known, default=0.0)
    if top <= 0:
        return None
    axis = ticks(0.0, top)
    ground, scale = HEIGHT - BOTTOM, (HEIGHT - TOP - BOTTOM) / axis[-1]
    group_width = (WIDTH - LEFT - RIGHT) / len(groups)
    width = group_width * (1 - GAP) / len(series)
    marks = [
        Bar(
            LEFT + group_width * (i + GAP / 2) + width * k,
            ground - value * scale,
            width,
            value * scale,
            k,
            f"{name}, {groups[i]}: {value:,.1f} {unit}",
        )
        for k, (name, figures) in enumerate(series.items())
        for i, value in enumerate(figures)
        if value is not None
    ]
    return Bars(
        title,
        list(series),
        marks,
        [Tick(ground - value * scale, f"{value:,.{_digits(axis)}f}") for value in axis],
        [Tick(LEFT + group_width * (i + 0.5), name) for i, name in enumerate(groups)],
    )


def intervals(title: str, rows: Mapping[str, Ratio]) -> Intervals:
    """rows: name -> ratio; at least one. The axis holds 1."""
    low = min(1.0, *(of.low for of in rows.values()))
    high = max(1.0, *(of.high for of in rows.values()))
    axis = ticks(low, max(high, low + 0.1))
    scale = (WIDTH - NAMES - RIGHT - TOP) / (axis[-1] - axis[0])

    def x(value: float) -> float:
        return NAMES + (value - axis[0]) * scale

    marks = [
        Interval(
            ROW * (i + 0.5),
            x(of.low),
            x(of.geomean),
            x(of.high),
            name,
            f"{name}: {of.geomean:.3f}, 95 % interval {of.low:.3f} to {of.high:.3f}",
        )
        for i, (name, of) in enumerate(rows.items())
    ]
    values = [Tick(x(value), f"{value:.{max(1, _digits(axis))}f}") for value in axis]
    return Intervals(title, ROW * len(rows) + BOTTOM, marks, values, x(1.0))


def _digits(axis: Sequence[float]) -> int:
    """Decimals that tell the steps of an axis apart."""
    return max(0, -math.floor(math.log10(axis[1] - axis[0]) + 1e-9))
