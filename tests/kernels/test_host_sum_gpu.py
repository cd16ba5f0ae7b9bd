"""The sum through host memory on one GPU: eight ranks of one process, and two that are processes.

All ranks of a launch run at once, a few programs each, so they may wait for each other.
"""

import multiprocessing
import os
import random
import signal
from pathlib import Path
from types import ModuleType

import host_sum_ranks
import pytest
import torch
import triton
from host_sum_process import PAIR, same_bits, sum_and_lose
from host_sum_ranks import MUTATIONS, STAGGER, edited

from dspark.kernels.collective import host_file, host_start, ordered_sum
from dspark.kernels.collective.host_layout import (
    CHANNELS,
    GROUP,
    HEAD_WORDS,
    Layout,
    flag_of,
    views,
)
from dspark.kernels.collective.host_sum import host_sum_of
from dspark.kernels.collective.reference import ordered_sum as reference_sum

pytestmark = pytest.mark.gpu

# Of eight streams that wait for each other none may queue behind another. Read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

RANKS, COLUMNS = 8, 4096
LAYOUT = Layout(RANKS, COLUMNS)
NEAR_THE_END = 2**32 - 100  # of what a flag can count


class Ranks:
    """Eight ranks, their memory and their counters, summing by the kernels of `module`."""

    def __init__(
        self, device, module: ModuleType = host_sum_ranks, epoch: int = NEAR_THE_END, limit=5.0
    ):
        self.module, self.device = module, device
        self.memory = torch.zeros(LAYOUT.nbytes, dtype=torch.uint8, pin_memory=True)
        self.views = views(self.memory, LAYOUT)
        self.views.flag.fill_(flag_of(epoch))
        self.epochs = torch.full((RANKS, CHANNELS), epoch, dtype=torch.int64, device=device)
        self.control = torch.zeros(RANKS, 2, dtype=torch.int64, device=device)
        self.control[:, 0] = int(limit * 1e9)

    def sum(self, partials: torch.Tensor, come: int = RANKS, force_two: bool = False):
        """bf16 [sums, RANKS, T, COLUMNS] on the device -> the ranks' sums, as many.

        come: ranks 0..come-1 do.
        """
        partials = partials.contiguous()
        outs = torch.full_like(partials, -1.0)
        words, sums, rows = partials.view(torch.int32), partials.shape[0], partials.shape[2]
        v, into, row = self.views, outs.view(torch.int32), LAYOUT.row_words
        own, slot = v.slot.stride()[:2]
        sizes = {"RANKS": RANKS, "OWN": own, "SLOT": slot, "ROW": row, "BLOCK": row}
        if rows == 1 and not force_two:
            self.module.all_one_shot[(1, come)](
                words, into, v.slot, v.flag, v.fault, self.epochs, self.control, sums,
                **sizes, num_warps=8,
            )  # fmt: skip
        else:
            cut = LAYOUT.slice_words
            self.module.all_two_shot[(triton.cdiv(rows, GROUP), come)](
                words, into, v.slot, v.part, v.flag, v.fault, self.epochs, self.control, sums,
                rows, PART=v.part.stride(1), SLICE=cut, SLICE_BLOCK=cut, **sizes, num_warps=8,
            )  # fmt: skip
        return outs


def numbers(sums: int, rows: int, seed: int = 0) -> torch.Tensor:
    """bf16 [sums, RANKS, rows, COLUMNS] of many magnitudes, on the CPU."""
    shape = (sums, RANKS, rows, COLUMNS)
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(shape, generator=generator).exp2()
    return (torch.randn(shape, generator=generator) * sizes).bfloat16()


def oracle(partials: torch.Tensor) -> torch.Tensor:
    """[sums, RANKS, ...] -> every rank's sum, the same shape."""
    total = torch.stack([reference_sum(each) for each in partials])
    return total[:, None].expand_as(partials).contiguous()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 8, 17, 48, 63, 64])
def test_all_ranks_hold_the_ordered_sum(device, rows):
    partials = numbers(8, rows)
    assert same_bits(Ranks(device).sum(partials.to(device)), oracle(partials))


def test_permuted_rows_and_a_row_alone(device):
    ranks, partials = Ranks(device), numbers(1, 48)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    whole = ranks.sum(partials.to(device))
    assert same_bits(whole, oracle(partials))
    assert same_bits(ranks.sum(partials[:, :, order].to(device)), whole[:, :, order.to(device)])
    for row in range(48):
        alone = ranks.sum(partials[:, :, row : row + 1].contiguous().to(device))
        assert same_bits(alone, whole[:, :, row : row + 1])


def test_one_shot_two_shot_and_slices_are_the_same_bits(device):
    ranks, partials = Ranks(device), numbers(4, 1)
    one = ranks.sum(partials.to(device))
    assert same_bits(ranks.sum(partials.to(device), force_two=True), one)
    slices = partials[0].to(device).chunk(RANKS, dim=-1)
    sliced = torch.cat([ordered_sum(piece.contiguous()) for piece in slices], -1)
    assert same_bits(sliced, one[0, 0])


def staggered(tmp_path: Path, mutation: str | None = None) -> ModuleType:
    edits = [*(() if mutation is None else MUTATIONS[mutation]), *STAGGER]
    return edited(edits, tmp_path, f"host_sum_{'as_it_is' if mutation is None else 'mutant'}")


def wrong_numbers(ranks: Ranks, rows: int, sums: int, rounds: int) -> int:
    """Of `rounds` launches of `sums` sums each; every sum has numbers of its own."""
    partials = numbers(sums, rows, seed=rows)
    expected = oracle(partials).to(ranks.device).view(torch.int16)
    partials = partials.to(ranks.device)
    wrong = torch.zeros((), dtype=torch.int64, device=ranks.device)
    for _ in range(rounds):
        wrong += (ranks.sum(partials).view(torch.int16) != expected).sum()
    return int(wrong)


@pytest.mark.parametrize(("rows", "sums", "rounds"), [(1, 500, 160), (6, 100, 150), (64, 20, 250)])
def test_a_hundred_thousand_sums_of_late_ranks(device, tmp_path, rows, sums, rounds):
    """80,000 of one row, 15,000 of six and 5,000 of 64, across the end of the flags' circle."""
    ranks = Ranks(device, staggered(tmp_path))
    assert wrong_numbers(ranks, rows, sums, rounds) == 0
    assert ranks.views.fault.count_nonzero() == 0


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_is_caught(device, tmp_path, mutation):
    """Some of them show once only, where the flags' circle ends: twenty tries."""
    module = staggered(tmp_path, mutation)
    assert any(
        wrong_numbers(Ranks(device, module, limit=0.2), rows, 150, 1) for rows in [1, 6] * 10
    )


def test_graphs_of_different_size_replay_in_any_order(device):
    ranks, sizes = Ranks(device), (1, 2, 6, 8, 48)
    inputs = {rows: numbers(3, rows, seed=rows).to(device) for rows in sizes}
    expected = {rows: oracle(inputs[rows].cpu()) for rows in sizes}
    graphs = {}
    for rows in sizes:
        ranks.sum(inputs[rows])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ranks.sum(inputs[rows])
        graphs[rows] = graph, out
    chance = random.Random(0)
    for _ in range(300):
        rows = chance.choice(sizes)
        graph, out = graphs[rows]
        graph.replay()
        assert same_bits(out, expected[rows])


@pytest.mark.parametrize("rows", [1, 6])
def test_a_rank_that_never_arrives_is_noted(device, rows):
    ranks = Ranks(device, limit=0.05)
    ranks.views.serving[0] = 1
    outs = ranks.sum(numbers(2, rows).to(device), come=RANKS - 1)
    assert outs[:, : RANKS - 1].isnan().all()
    head = ranks.memory[: 4 * HEAD_WORDS].numpy().tobytes()
    fault = host_file.read_fault(head)
    assert fault is not None
    assert fault.missing == RANKS - 1
    assert ranks.control[: RANKS - 1, 1].tolist() == [1] * (RANKS - 1)


# --- the production wrapper, on streams and in processes ------------------------------------------


@pytest.fixture
def registered(device):
    """A real file, locked and mapped as at start."""
    name = host_file.create(LAYOUT)
    mapped = host_file.attach(name, LAYOUT, 0)
    host_file.remove(name)
    torch.zeros(1, device=device)
    host_start.register(mapped, device)
    yield mapped
    host_start.let_go(mapped, device)


def test_ranks_on_eight_streams(device, registered):
    """Ranks are launched in turn: a rank's next sum never stands before another one's this sum."""
    ends = [host_sum_of(registered, LAYOUT, r, device) for r in range(RANKS)]
    inputs = {rows: numbers(1, rows, seed=rows)[0] for rows in (1, 2, 6, 48)}
    on_device = {rows: partials.to(device) for rows, partials in inputs.items()}
    for end in ends:  # load the kernels while nobody waits
        end.wait_at_most(0)
        for partials in on_device.values():
            end(partials[end.rank])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in ends]
    for end in ends:
        end.wait_at_most(5)
    torch.cuda.synchronize()
    chance = random.Random(0)
    totals = []
    for _ in range(200):
        rows = chance.choice(list(inputs))
        for end, stream in zip(ends, streams, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(chance.randrange(20_000))
                totals.append((rows, end(on_device[rows][end.rank])))
    torch.cuda.synchronize()
    assert not any(end.gave_up for end in ends)
    expected = {rows: reference_sum(partials) for rows, partials in inputs.items()}
    assert all(same_bits(total, expected[rows]) for rows, total in totals)


def test_two_processes_and_the_death_of_one(device):
    context = multiprocessing.get_context("spawn")
    barrier, gone, results = context.Barrier(2), context.Event(), context.SimpleQueue()
    name = host_file.create(PAIR)
    try:
        processes = [
            context.Process(
                target=sum_and_lose, args=(name, rank, barrier, gone, results), daemon=True
            )
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        assert sorted([results.get(), results.get()]) == [(0, 0), (1, 0)]
        os.kill(processes[1].pid, signal.SIGKILL)
        processes[1].join()
    finally:
        host_file.remove(name)
    gone.set()
    # Six rows are the first two groups, channels 1 and 2; a mark is one more.
    is_nan, noted = results.get()
    assert is_nan
    assert noted[1] in (2, 3)
    assert noted[0] == sum(noted[2:]) == 0
    processes[0].join()
    assert processes[0].exitcode == 0
