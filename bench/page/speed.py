"""Throughputs, latencies and ratios, as charts and tables."""

from collections.abc import Iterable, Mapping

from dspark.bench.interval import Ratio
from dspark.bench.page.charts import Bars, bars, intervals
from dspark.bench.page.parts import Levels, Record, Section, Table, share, titled
from dspark.bench.table import counted, number
from dspark.bench.throughput import THROUGHPUTS

STATISTICS = {name: name.replace("_", " ") for name in THROUGHPUTS}
MEANING = (
    "Scheduler output is what the server says of itself. Decode window counts tokens while every "
    "request decodes. End to end is all tokens over all time, prompts and stragglers included."
)


def fastest(arms: Iterable[Levels]) -> float:
    """Of every throughput, so that charts of several arms share an axis."""
    known = (level[name] or 0.0 for levels in arms for level in levels for name in THROUGHPUTS)
    return max(known, default=0.0)


def throughput(arm: str, levels: Levels, highest: float) -> Bars | None:
    return bars(
        titled("Tokens/s by clients", arm),
        [counted(level["concurrency"], "client") for level in levels],
        {shown: [level[name] for level in levels] for name, shown in STATISTICS.items()},
        "tokens/s",
        highest,
    )


def figures(title: str, levels: Levels) -> Table:
    header = [
        "clients", *(f"{shown} tok/s" for shown in STATISTICS.values()), "tokens a verify step",
        "step ms", "first token p50 ms", "p99", "next tokens p50 ms", "p99",
    ]  # fmt: skip
    rows = [
        [
            str(level["concurrency"]),
            *(number(level[name]) for name in THROUGHPUTS),
            number(level["accepted_length"], 2),
            number(level["step_time"], 1, 1e3),
            *(number(level["ttft"].get(p), 0, 1e3) for p in ("p50", "p99")),
            *(number(level["itl"].get(p), 1, 1e3) for p in ("p50", "p99")),
        ]
        for level in levels
    ]
    return Table(title, header, rows)


def linear(levels: Levels) -> Table:
    rows = [
        [str(level["concurrency"]), *(share(level["of_linear"][name]) for name in THROUGHPUTS)]
        for level in levels
    ]
    title = "Share of as many times the figure of one client"
    return Table(title, ["clients", *STATISTICS.values()], rows)


def ratio(record: Record, arms: Mapping[str, str]) -> Section:
    title = f"{arms['B']} over {arms['A']}"
    if record["speed_up"] is None:
        return Section(title, "No ratio: the arms did not do the same work.")
    ratios = {
        f"{counted(int(clients), 'client')}, {STATISTICS[name]}": Ratio(**of)
        for clients, by_statistic in record["speed_up"].items()
        for name, of in by_statistic.items()
    }
    rows = [
        [
            name,
            f"{of.geomean:.3f}",
            f"{of.low:.3f} to {of.high:.3f}",
            str(of.pairs),
            "yes" if of.differs_from_one() else "no",
        ]
        for name, of in ratios.items()
    ]
    return Section(
        title,
        "Geometric mean of the ratios of pairs measured back to back, in alternating order.",
        intervals=[intervals("Ratio with its 95 % interval", ratios)] if ratios else [],
        tables=[Table("", ["", "ratio", "95 % interval", "pairs", "differs from 1"], rows)],
    )


def rounds(record: Record, arms: Mapping[str, str]) -> Table:
    """End to end, one column an arm and number of clients."""
    clients = [level["concurrency"] for level in record["rounds"][0]["levels"]["A"]]
    header = ["round", "order"] + [
        f"{label}, {counted(c, 'client')}" for label in arms.values() for c in clients
    ]
    rows = [
        [
            str(i),
            one["order"],
            *(number(level["end_to_end"]) for arm in arms for level in one["levels"][arm]),
        ]
        for i, one in enumerate(record["rounds"], 1)
    ]
    return Table("End to end, tokens/s", header, rows)
