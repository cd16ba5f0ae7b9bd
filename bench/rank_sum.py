"""Microseconds of one sum over eight ranks on cards without peer access, measured on one card.

    python -m dspark.bench.rank_sum [--record FILE]

One rank, the consumer, is the production kernel inside a CUDA graph. The other seven are programs
of a second kernel on the same card that publish what their ranks would and read nothing: a card of
a real machine reads over a link of its own. They come *early*, while the consumer is in the sum
before, or *late*, once they have seen that it has arrived: the truth of ranks that come together
lies between.

Beside it stands what a gather through page-locked memory takes with plain copies, without any
waiting for other ranks: the own rows out, the other seven in, `ordered_sum`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dspark.bench.environment import describe
from dspark.bench.graph_time import graph_time
from dspark.bench.measure import write_record
from dspark.bench.table import table
from dspark.kernels.collective import host_layout, ordered_sum
from dspark.kernels.collective.host_kernel import release, wait
from dspark.kernels.collective.host_layout import GROUP, SLOTS, Layout, Views
from dspark.kernels.collective.host_sum import HostSum, host_sum_of
from dspark.kernels.collective.reference import ordered_sum as reference_sum

RANKS, COLUMNS, CONSUMER = 8, 4096, 0
LAYOUT = Layout(RANKS, COLUMNS)
ROWS = (1, 2, 6, 8, 48)
CHAIN = 64  # sums of a graph
REPLAYS = 30
BEGIN = 1000  # the epoch before the first that is timed
LIMIT_NS = 10_000_000_000
# Of the projection to a card on PCIe 4; both are what one direction of 16 lanes carries.
HERE, THERE = 46e9, 23e9  # bytes/s that a kernel reads of host memory
ASSUMPTIONS = (
    f"this card's link carries {HERE / 1e9:.0f} GB/s into it (PCIe 5, measured elsewhere); half of "
    "it on PCIe 4, so bytes take twice the time there",
    "a round trip over the link, a launch and the host's memory take the same time on both",
    "eight cards that read at once do not slow each other down: each has 16 lanes to the processor "
    "that owns the memory",
    "no figure here was measured on an Ada card",
)

_ROW = tl.constexpr(host_layout.MOST_RANKS)
_PHASE = tl.constexpr(SLOTS * host_layout.MOST_RANKS)
_SLOTS = tl.constexpr(SLOTS)
_CONSUMER = tl.constexpr(CONSUMER)


@triton.jit
def publishers(
    rows_in, slot, part, flag, fault, control, epoch, sums, rows,
    TWO_SHOT: tl.constexpr, LATE: tl.constexpr, OWN: tl.constexpr, SLOT: tl.constexpr,
    PART: tl.constexpr, ROW: tl.constexpr, SLICE: tl.constexpr, GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    """What the ranks beside the consumer publish, `sums` times. Grid: (channels, 7).

    rows_in: i32 [8, rows, ROW] of all ranks, two bf16 a word; in place of the columns of the sum,
    which only the consumer works out, they publish the first columns of their own rows.
    epoch: the last one. control: i64 [2] as in `host_kernel.one_shot`.
    """
    group = tl.program_id(0)
    rank = tl.program_id(1)
    rank = tl.where(rank < _CONSUMER, rank, rank + 1)
    channel = group + 1 if TWO_SHOT else group
    place = (1 + group * GROUP_ROWS) * ROW if TWO_SHOT else 0
    row = group * GROUP_ROWS + tl.arange(0, GROUP_ROWS)[:, None]
    word, cut = tl.arange(0, ROW)[None, :], tl.arange(0, SLICE)[None, :]
    inside = tl.arange(0, GROUP_ROWS)[:, None]
    own_rows = tl.load(rows_in + (rank * rows + row) * ROW + word, mask=row < rows)
    own_cut = tl.load(rows_in + (rank * rows + row) * ROW + cut, mask=row < rows)
    limit = tl.load(control)
    flags_of_channel = flag + channel * (2 * _PHASE)
    for _ in range(sums):
        before = epoch
        epoch += 1
        turn = (epoch % _SLOTS).to(tl.int32)
        flags = flags_of_channel + turn * _ROW
        if LATE:
            wait(flags + _CONSUMER, epoch.to(tl.int32), limit, fault, 1, control, 1)
        else:
            turn_before = (before % _SLOTS).to(tl.int32)
            its = flags_of_channel + turn_before * _ROW + _CONSUMER
            wait(its, before.to(tl.int32), limit, fault, 1, control, 1)
        own = slot + rank * OWN + turn * SLOT + place
        tl.store(own + inside * ROW + word, own_rows, mask=row < rows)
        release(flags + rank, epoch.to(tl.int32))
        if TWO_SHOT:
            wait(flags + _CONSUMER, epoch.to(tl.int32), limit, fault, 1, control, 1)
            own_part = part + rank * OWN + turn * PART + row * SLICE
            tl.store(own_part + cut, own_cut, mask=row < rows)
            release(flags + _PHASE + rank, epoch.to(tl.int32))


def publish(
    rows: torch.Tensor, views: Views, control: torch.Tensor, epoch: int, sums: int, late: bool
) -> None:
    """Launch the seven on the current stream. rows: bf16 [8, T, COLUMNS]."""
    count = rows.shape[1]
    two_shot = count > 1
    own, slot = views.slot.stride()[:2]
    publishers[(triton.cdiv(count, GROUP) if two_shot else 1, RANKS - 1)](
        rows.view(torch.int32), views.slot, views.part, views.flag, views.fault[CONSUMER + 1],
        control, epoch, sums, count,
        TWO_SHOT=two_shot, LATE=late, OWN=own, SLOT=slot, PART=views.part.stride(1),
        ROW=LAYOUT.row_words, SLICE=LAYOUT.slice_words, GROUP_ROWS=GROUP if two_shot else 1,
        num_warps=8,
    )  # fmt: skip


class Bench:
    """The consumer, the others and the memory between them."""

    def __init__(self, device: torch.device):
        self.device = device
        self.memory = torch.zeros(LAYOUT.nbytes, dtype=torch.uint8, pin_memory=True)
        self.consumer: HostSum = host_sum_of(self.memory, LAYOUT, CONSUMER, device)
        self.control = torch.tensor([LIMIT_NS, 0], dtype=torch.int64, device=device)
        self.side = torch.cuda.Stream(device)

    def publish(self, rows: torch.Tensor, sums: int, late: bool) -> None:
        with torch.cuda.stream(self.side):
            publish(rows, self.consumer.views, self.control, BEGIN, sums, late)

    def begin(self) -> None:
        """Everybody is in epoch BEGIN."""
        torch.cuda.synchronize(self.device)
        self.consumer.views.flag.fill_(BEGIN)
        self.consumer.epochs.fill_(BEGIN)

    def time(self, rows: torch.Tensor, late: bool) -> float:
        """Microseconds of one sum.

        Raises:
            RuntimeError: a sum was wrong, or somebody waited in vain.
        """
        mine = rows[CONSUMER]
        self.consumer.wait_at_most(0)  # load both kernels while nobody waits
        self.consumer(mine)
        self.publish(rows, 0, late)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CHAIN):
                total = self.consumer(mine)
        graph.replay()
        self.consumer.wait_at_most(LIMIT_NS / 1e9)
        self.begin()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.publish(rows, CHAIN * (REPLAYS + 1), late)
        graph.replay()
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize(self.device)
        if self.consumer.gave_up or int(self.control[1]):
            raise RuntimeError(f"{len(mine)} rows: a rank waited in vain")
        expected = expected_total(rows.cpu())
        if not torch.equal(total.cpu().view(torch.int16), expected.view(torch.int16)):
            raise RuntimeError(f"{len(mine)} rows: a wrong sum")
        return start.elapsed_time(end) * 1e3 / (CHAIN * REPLAYS)


def expected_total(rows: torch.Tensor) -> torch.Tensor:
    """What the consumer gets: of the others' columns, what they publish in their place."""
    total = reference_sum(rows)
    if rows.shape[1] > 1:
        cut = COLUMNS // RANKS
        for rank in range(RANKS):
            if rank != CONSUMER:
                total[:, rank * cut : (rank + 1) * cut] = rows[rank, :, :cut]
    return total


def copies_time(rows: torch.Tensor) -> float:
    """Microseconds of a gather by copies through page-locked memory, and the sum."""
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    gathered = torch.empty_like(rows)

    def gather_and_sum(_: int) -> None:
        host[CONSUMER].copy_(rows[CONSUMER], non_blocking=True)
        gathered[CONSUMER + 1 :].copy_(host[CONSUMER + 1 :], non_blocking=True)
        ordered_sum(gathered)

    return graph_time(gather_and_sum)


class Bytes(NamedTuple):
    """Over the card's link in one sum."""

    received: int
    sent: int


def bytes_of(rows: int, columns: int = COLUMNS) -> Bytes:
    """Of the kernel: everything a rank reads and writes of host memory, its own rows too."""
    row = 2 * columns
    if rows == 1:
        return Bytes(RANKS * row, row)
    return Bytes(2 * rows * row, rows * row + rows * row // RANKS)


def projected(microseconds: float, rows: int) -> float:
    """On PCIe 4, by ASSUMPTIONS."""
    return microseconds + bytes_of(rows).received * (1 / THERE - 1 / HERE) * 1e6


def figure_of(bench: Bench, rows: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(RANKS, rows, COLUMNS, generator=generator).bfloat16().to(bench.device)
    early, late = bench.time(inputs, late=False), bench.time(inputs, late=True)
    return {
        "rows": rows,
        "kernel": "one_shot" if rows == 1 else "two_shot",
        **bytes_of(rows)._asdict(),
        "early_us": early,
        "late_us": late,
        "copies_us": copies_time(inputs),
        "early_us_pcie4": projected(early, rows),
        "late_us_pcie4": projected(late, rows),
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dspark.bench.rank_sum", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the record here")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device to time anything on")
    bench = Bench(torch.device("cuda"))
    figures = [figure_of(bench, rows) for rows in ROWS]
    for line in ASSUMPTIONS:
        print(f"assumed: {line}")
    header = ["rows", "kernel", "KB read", "early us", "late us", "copies us", "PCIe 4 us"]
    print(table(header, [line_of(figure) for figure in figures]))
    if options.record:
        record = {"environment": describe(), "assumptions": ASSUMPTIONS, "figures": figures}
        write_record(options.record, record)
    return 0


def line_of(figure: dict[str, Any]) -> list[str]:
    projection = f"{figure['early_us_pcie4']:.1f} to {figure['late_us_pcie4']:.1f}"
    return [
        str(figure["rows"]), figure["kernel"], f"{figure['received'] / 1024:.0f}",
        f"{figure['early_us']:.1f}", f"{figure['late_us']:.1f}", f"{figure['copies_us']:.1f}",
        projection,
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
