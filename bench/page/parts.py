"""What a page is made of, before it is HTML."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dspark.bench.page.charts import Bars, Intervals

Record = Mapping[str, Any]
Levels = Sequence[Mapping[str, Any]]  # `Figures` of `dspark.bench.throughput`, by clients
Facts = Sequence[tuple[str, str]]  # name and value


class Verdict(NamedTuple):
    """kind: `good`, `bad` or `open`."""

    kind: str
    title: str
    text: str


class Table(NamedTuple):
    title: str
    header: list[str]
    rows: list[list[str]]


class Section(NamedTuple):
    """Shown in this order; nothing of what is empty."""

    title: str
    note: str = ""
    facts: Facts = ()
    intervals: Sequence[Intervals] = ()
    bars: Sequence[Bars | None] = ()
    tables: Sequence[Table] = ()


class Page(NamedTuple):
    title: str
    verdict: Verdict
    facts: Facts
    sections: list[Section]


def share(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"


def titled(what: str, arm: str) -> str:
    return f"{what}, {arm}" if arm else what
