"""How long the experts take from one row to the most that a step verifies, and where it jumps.

    python -m dspark.bench.verify_rows [--json FILE]

Shapes of one of eight ranks of Flash: 256 experts of 256 columns, six a row, inside a CUDA graph.
A row count is a cliff where it takes more than 1.3 times what the line through its neighbours says.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from dspark.bench.environment import describe
from dspark.bench.graph_time import graph_time
from dspark.bench.measure import write_record
from dspark.bench.table import table
from dspark.bench.tune.moe import build

ROWS = (1, 6, 10, 11, 12, 24, 36, 48, 60, 72, 84, 85, 86, 90, 96, 108, 120, 144, 192, 240, 288, 341)
CLIFF = 1.3


class Point(NamedTuple):
    rows: int
    microseconds: float
    over_line: float | None  # against the line through its neighbours; None at either end


def against_neighbours(times: dict[int, float]) -> list[Point]:
    """`times`: microseconds by rows, ascending."""
    points = []
    counts = list(times)
    for place, rows in enumerate(counts):
        over = None
        if 0 < place < len(counts) - 1:
            low, high = counts[place - 1], counts[place + 1]
            share = (rows - low) / (high - low)
            over = times[rows] / (times[low] + share * (times[high] - times[low]))
        points.append(Point(rows, times[rows], over))
    return points


def cliffs(points: Sequence[Point]) -> list[int]:
    """Row counts that cost more than CLIFF times their line."""
    return [point.rows for point in points if (point.over_line or 0) > CLIFF]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device to time anything on")
    device = torch.device("cuda")
    times = {rows: graph_time(build(rows, device, 1), chain=8) for rows in ROWS}
    points = against_neighbours(times)
    rows = [[str(p.rows), f"{p.microseconds:.1f}", f"{p.over_line or 0:.2f}"] for p in points]
    print(table(("rows", "us", "over the line"), rows))
    found = cliffs(points)
    record = {
        "environment": describe(),
        "points": [point._asdict() for point in points],
        "cliffs": found,
    }
    write_record(options.json, record)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
