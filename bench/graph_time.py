"""Time a kernel as decode runs it: inside a CUDA graph, on inputs that are not in the cache."""

import statistics
from collections.abc import Callable

import torch

Launch = Callable[[int], object]  # index of the input copy


def copies_for(moved: int, most: int = 64) -> int:
    """Input copies with which a round over them touches twice the L2 cache, up to `most`."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return min(most, 2 * cache // max(moved, 1) + 1)


def graph_time(launch: Launch, copies: int = 1, repeats: int = 30, chain: int = 64) -> float:
    """Median microseconds of one launch, over graph replays."""
    rounds = -(-chain // copies)
    for copy in range(copies):
        launch(copy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for copy in range(copies):
                launch(copy)
    graph.replay()
    return median_time(graph.replay, repeats) / (rounds * copies)


def eager_time(launch: Launch, repeats: int = 30) -> float:
    """Median microseconds of one launch from the host, for ops that no graph can hold."""
    for _ in range(3):
        launch(0)
    return median_time(lambda: launch(0), repeats)


def copy_bandwidth() -> float:
    """Bytes/s that a kernel reads and writes; a copy node of a graph would be much slower."""
    source = torch.ones(1 << 28, device="cuda")
    target = torch.empty_like(source)
    seconds = graph_time(lambda _: torch.neg(source, out=target), chain=4) * 1e-6
    return 2 * source.nbytes / seconds


def median_time(run: Callable[[], object], repeats: int) -> float:
    """Median microseconds on the device of one `run`."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)
