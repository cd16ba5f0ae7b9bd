"""Project a decode step of eight ranks without peer access, by what carries their sums.

    python -m dspark.bench.rank_step [--card 4090] [--record bench/results/rank-sum-h200.json]

A step is what `dspark plan` projects, with other sums. Each row says what the sums of one step
launch on a card, what a card receives for them, and what they take. With a record of
`dspark.bench.rank_sum` the sums through host memory take what was measured there, projected to
PCIe 4 with the other ranks late; without one, what they are made of.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dspark.bench.rank_sum import THERE, bytes_of
from dspark.bench.table import table
from dspark.commands import projection
from dspark.commands.cards import CARDS
from dspark.commands.plan import plan_memory
from dspark.host.memory_budget import GIB, Load, Wishes
from dspark.kernels.collective import GATHERED_ROWS
from dspark.kernels.collective.host_layout import MOST_ROWS
from dspark.target.checkpoint import presets
from dspark.target.config import ModelConfig

RANKS = 8
REQUESTS = (1, 8)
TOKENS = 4096  # of each request
# Seconds, of what one sum through host memory is made of.
VISIBLE = 1.1e-6  # from a store to where another card can read it
ROUND_TRIP = 1.24e-6  # a read of host memory that waits for its answer
EMPTY_LAUNCH = 1.2e-6  # in a graph


class Sum(NamedTuple):
    """One sum of [rows, hidden] in bf16."""

    launches: int
    received: float  # bytes, of one card
    seconds: float


class StepSums(NamedTuple):
    """All sums and small exchanges of one step."""

    sums: int
    launches: int
    received: float
    seconds: float


HowToSum = Callable[[int, int], Sum]  # (rows, columns)


def gathered(rows: int, columns: int) -> Sum:
    """Every rank's rows to everyone, then `ordered_sum`."""
    received = (RANKS - 1) * 2 * rows * columns
    return Sum(2, received, projection.EXCHANGE + received / projection.EXCHANGED)


def messages(rows: int, columns: int) -> Sum:
    """As `tp_sum` does without host memory: whole rows, or two exchanges of column slices, with a
    copy before and behind."""
    if rows <= GATHERED_ROWS:
        return gathered(rows, columns)
    received = 2 * (RANKS - 1) * 2 * rows * columns / RANKS
    return Sum(5, received, 2 * projection.EXCHANGE + received / projection.EXCHANGED)


def through_host(rows: int, columns: int) -> Sum:
    """One launch; what is read once or twice the others must have made visible."""
    assert rows <= MOST_ROWS
    meetings = 1 if rows == 1 else 2
    received = bytes_of(rows, columns).received
    # The flags are read, then the payload: two round trips.
    waiting = meetings * (VISIBLE + 2 * ROUND_TRIP)
    return Sum(1, received, EMPTY_LAUNCH + waiting + received / THERE)


def as_measured(record: dict) -> HowToSum:
    """`through_host` with the times of a record of `rank_sum`, straight lines between its rows."""
    known = {figure["rows"]: figure["late_us_pcie4"] * 1e-6 for figure in record["figures"]}

    def measured(rows: int, columns: int) -> Sum:
        return through_host(rows, columns)._replace(seconds=between(known, rows))

    return measured


def between(known: dict[int, float], rows: int) -> float:
    """At `rows`, which lies between the least and the most that is known."""
    below = max(r for r in known if r <= rows)
    above = min(r for r in known if r >= rows)
    if below == above:
        return known[below]
    return known[below] + (known[above] - known[below]) * (rows - below) / (above - below)


def sums_of(load: Load, requests: int, how: HowToSum) -> StepSums:
    """Of a step of `requests` requests; the small exchanges stay messages."""
    c, rows = load.config, requests * load.verify_width
    parts = [(2 * c.num_hidden_layers + 1, how(rows, c.hidden_size))]
    exchanges = 0.0
    if load.stages:
        gamma = load.verify_width - 1
        parts.append((2 * load.stages + 1, how(requests * gamma, c.hidden_size)))
        exchanges = (gamma + projection.DECISIONS) * projection.EXCHANGE
    return StepSums(
        sum(count for count, _ in parts),
        sum(count * one.launches for count, one in parts),
        sum(count * one.received for count, one in parts),
        sum(count * one.seconds for count, one in parts) + exchanges,
    )


def lines_of(load: Load, bandwidth: float, how: dict[str, HowToSum]) -> list[list[str]]:
    lines = []
    for width, mode in ((1, "target only"), (load.verify_width, "DSpark")):
        of_mode = load._replace(verify_width=width)
        for requests in REQUESTS:
            step = projection.step(of_mode, bandwidth, requests, TOKENS)
            for name, one in how.items():
                sums = sums_of(of_mode, requests, one)
                whole = step._replace(summing=sums.seconds).seconds
                lines.append([
                    mode, str(requests), name, str(sums.sums), str(sums.launches),
                    f"{sums.received / 1e6:.1f}", f"{sums.seconds * 1e3:.1f}",
                    f"{whole * 1e3:.1f}",
                ])  # fmt: skip
    return lines


def assumptions(load: Load, bandwidth: float, record: Path | None) -> list[str]:
    host = (
        f"sums through host memory take what {record.name} says of ranks that come late, its bytes "
        "at half the speed"
        if record
        else "a sum through host memory takes, with all ranks together, "
        f"{EMPTY_LAUNCH * 1e6:.1f} us of launch, and once (one row) or twice "
        f"{VISIBLE * 1e6:.1f} us until stores are visible and two round trips of "
        f"{ROUND_TRIP * 1e6:.2f} us; its bytes come at {THERE / 1e9:.0f} GB/s"
    )
    return [*projection.assumptions(load, bandwidth, TOKENS), host]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dspark.bench.rank_step", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--card", choices=CARDS, default="4090")
    parser.add_argument("--record", type=Path, metavar="FILE", help="of dspark.bench.rank_sum")
    options = parser.parse_args(argv)
    card = CARDS[options.card]
    config = ModelConfig.from_hf(presets.flash())
    load = plan_memory(config, RANKS, int(card.free * GIB), Wishes(), drafts=True).load
    host: HowToSum = through_host
    if options.record:
        host = as_measured(json.loads(options.record.read_text()))
    how: dict[str, HowToSum] = {"gathered": gathered, "messages": messages, "host memory": host}
    bandwidth = card.bandwidth * 1e9
    for line in assumptions(load, bandwidth, options.record):
        print(f"assumed: {line}")
    header = ["step", "requests", "sums by", "sums", "launches", "MB in", "ms of sums", "ms a step"]
    print(table(header, lines_of(load, bandwidth, how)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
