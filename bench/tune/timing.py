"""Time two configurations back to back inside CUDA graphs."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from dspark.bench.tune.op import Case, Launch, TunedOp, configured
from dspark.kernels.common.launch_table import LaunchConfig

CHAIN = 128  # launches a graph holds at least, so that the gap between replays does not count
MOST_COPIES, FEW_COPIES = 512, 16
# Of two identical graphs on a Hopper card, the one captured second took 1 to 5 % longer for a
# kernel of one microsecond. So every case captures both arms anew several times, in turn AB and BA.
BUILDS = 4


class Sample(NamedTuple):
    """One pair of times."""

    pair: int
    order: str  # "AB": incumbent first
    inner: int  # launches a time covers
    ms_a: float  # incumbent
    ms_b: float  # candidate


class Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    launches: int
    output: torch.Tensor  # of copy 0, before capture


def copies_for(case: Case, device: torch.device) -> int:
    """Enough inputs that a full round touches twice the L2 cache.

    Inputs too small for that are in the cache in a real step as well.
    """
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    copies = 2 * cache // max(case.moved, 1) + 1
    return copies if copies <= MOST_COPIES else FEW_COPIES


def builds(
    op: TunedOp, incumbent: LaunchConfig, candidate: LaunchConfig, case: Case, device: torch.device
) -> Iterator[tuple[Graph, Graph]]:
    """(incumbent, candidate) graphs on the same inputs, captured in alternating order."""
    copies = copies_for(case, device)
    launch = case.build(device, copies)
    for build in range(BUILDS):
        if build % 2 == 0:
            a = capture(op, incumbent, launch, copies, device)
            b = capture(op, candidate, launch, copies, device)
        else:
            b = capture(op, candidate, launch, copies, device)
            a = capture(op, incumbent, launch, copies, device)
        yield a, b


def capture(
    op: TunedOp, config: LaunchConfig, launch: Launch, copies: int, device: torch.device
) -> Graph:
    """Compile, run every copy once, and capture whole rounds over the copies."""
    with configured(op, config):
        output = launch(0).clone()
        for copy in range(1, copies):
            launch(copy)
        torch.cuda.synchronize(device)
        rounds = -(-CHAIN // copies)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for copy in range(copies):
                    launch(copy)
    return Graph(graph, rounds * copies, output)


def milliseconds(graph: Graph, replays: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def calibrate(arms: Sequence[Graph], min_ms: float, max_ms: float) -> int:
    """Replays with which a sample of the slower arm lasts between the bounds.

    One replay is the least, even if it lasts longer.
    """
    for arm in arms:
        milliseconds(arm, 2)
    slower = max(milliseconds(arm, 3) / 3 for arm in arms)
    return max(1, min(round((min_ms * max_ms) ** 0.5 / slower), int(max_ms / slower)))


def sample_pairs(
    a: Graph,
    b: Graph,
    pairs: Sequence[tuple[int, str]],
    warmup: int,
    min_ms: float,
    max_ms: float,
) -> Iterator[Sample]:
    """`warmup` discarded pairs, then one sample for each (pair number, order)."""
    replays = calibrate((a, b), min_ms, max_ms)
    for _ in range(warmup):
        milliseconds(a, replays)
        milliseconds(b, replays)
    for pair, order in pairs:
        times = {arm: milliseconds(a if arm == "A" else b, replays) for arm in order}
        yield Sample(pair, order, replays * a.launches, times["A"], times["B"])


def busy_clock(graph: Graph, device: torch.device) -> int | None:
    """SM clock in MHz while the card works; None where the driver's tool is missing."""
    uuid = torch.cuda.get_device_properties(device).uuid
    query = ["nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=clocks.sm"]
    try:
        asked = subprocess.Popen(
            [*query, "--format=csv,noheader,nounits"], stdout=subprocess.PIPE, text=True
        )
    except OSError:
        return None
    deadline = time.monotonic() + 30
    while asked.poll() is None and time.monotonic() < deadline:
        milliseconds(graph, 1)
    asked.kill()
    answer = asked.communicate()[0].strip()
    return int(answer) if answer.isdigit() else None
