"""The kernel of the sum through host memory: ranks are processes, memory order is the host's."""

import contextlib
import gc
import multiprocessing
import os

import pytest
import torch
from torch import distributed as dist

from dspark.bench import rank_sum
from dspark.kernels.collective import host_file, host_reference, host_start, ordered_sum, tp_sum
from dspark.kernels.collective import host_sum as host_sum_module
from dspark.kernels.collective.host_layout import CHANNELS, Layout, flag_of, views
from dspark.kernels.collective.host_sum import HostSum, host_sum_of

COLUMNS = 128
CPU = torch.device("cpu")
FORK = multiprocessing.get_context("fork")
SIZES = (1, 6, 1, 2, 1, 9, 5)  # rows of one sum after the other
EPOCH = 2**32 - 4


def known(ranks: int, rows: int, number: int) -> torch.Tensor:
    shape = (ranks, rows, COLUMNS)
    generator = torch.Generator().manual_seed(number)
    sizes = torch.randn(shape, generator=generator).exp2()
    return (torch.randn(shape, generator=generator) * sizes).bfloat16()


def by_kernel(memory: torch.Tensor, layout: Layout, rank: int):
    return host_sum_of(memory, layout, rank, CPU, EPOCH)


def by_reference(memory: torch.Tensor, layout: Layout, rank: int):
    epochs = [EPOCH] * CHANNELS
    member = host_reference.member(memory, layout, rank, lambda: 0.0, 1.0, epochs)

    def run(partial: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(partial)
        host_reference.run(host_reference.programs(partial, out, member))
        return out

    return run


def one_rank(name: str, layout: Layout, rank: int, make, results) -> None:
    """Reports the numbers of its wrong sums."""
    torch.set_num_threads(1)
    run = make(host_file.attach(name, layout, rank), layout, rank)
    wrong = []
    for number, rows in enumerate(SIZES[: 24 // layout.ranks - 1]):
        partials = known(layout.ranks, rows, number)
        total = run(partials[rank])
        if not torch.equal(total, ordered_sum(partials)):
            wrong.append(number)
    results.put(wrong)


@pytest.mark.parametrize(
    "makers",
    [
        (by_kernel,) * 2,
        (by_kernel,) * 4,
        (by_kernel, by_reference),
        (by_reference, by_kernel, by_reference, by_reference, by_reference, by_kernel, by_reference,
         by_reference),
    ],
    ids=["two kernels", "four kernels", "one of each", "two of eight"],
)  # fmt: skip
def test_ranks_hold_the_ordered_sum(makers):
    layout = Layout(len(makers), COLUMNS)
    name = host_file.create(layout)
    try:
        mapped = host_file.attach(name, layout, 0)
        views(mapped, layout).flag.fill_(flag_of(EPOCH))
        results = FORK.SimpleQueue()
        ranks = [
            FORK.Process(target=one_rank, args=(name, layout, rank, make, results), daemon=True)
            for rank, make in enumerate(makers)
        ]
        for process in ranks:
            process.start()
        assert [results.get() for _ in ranks] == [[]] * len(makers)
        for process in ranks:
            process.join()
    finally:
        host_file.remove(name)


def alone(rank: int = 1) -> HostSum:
    """One of four ranks, which nobody will meet."""
    layout = Layout(4, COLUMNS)
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    return host_sum_of(memory, layout, rank, CPU)


@pytest.mark.parametrize(("rows", "noted"), [(1, 1), (3, 2)])
def test_ranks_that_do_not_come_are_noted(rows, noted):
    sums = alone()
    sums.control[0] = 20  # the interpreter counts looks
    total = sums(known(4, rows, 0)[1])
    assert total.isnan().all()
    assert sums.gave_up
    assert sums.views.fault[1].tolist() == [noted, 0, noted, noted, 0, 0, 0, 0]
    assert sums.views.fault[[0, *range(2, 8)]].count_nonzero() == 0


def test_nobody_is_waited_for_again_or_named_for_it():
    sums = alone()
    sums.control[0] = 20
    sums(known(4, 1, 0)[1])
    sums.control[0] = 1 << 60  # would never end
    assert sums(known(4, 6, 0)[1]).isnan().all()
    assert sums.views.fault[1].tolist() == [1, 0, 1, 1, 0, 0, 0, 0]


def test_a_sum_that_waits_for_nobody_notes_nothing():
    sums = alone()
    sums.wait_at_most(0)
    sums(known(4, 1, 0)[1])
    sums(known(4, 5, 0)[1])
    assert sums.views.fault.count_nonzero() == 0
    assert not sums.gave_up
    assert sums.epochs.tolist() == [1, 1, 1, *[0] * (CHANNELS - 3)]


def start(rank: int, ranks: int, init_file: str, epochs: int, fail, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=ranks)
    host_start.EPOCHS, host_start.INPUTS, host_start.TESTED_ROWS = epochs, 1, (1, 6)
    if fail is not None:
        fail(rank)
    group = dist.group.WORLD
    # A loader that has set other defaults must not matter.
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        outcome = host_start.set_up(group, CPU, COLUMNS)
    torch.set_default_dtype(torch.float32)
    through_host = host_sum_module.CHOSEN.get(group) is not None
    partials = known(ranks, 5, 0)
    right = torch.equal(tp_sum(partials[rank], group), ordered_sum(partials))
    on_host = bool(outcome.chosen is not None and outcome.chosen.epochs[2] > 0)
    gc.collect()  # what a raised error still refers to
    held = sum(host_file.PREFIX in name for name in descriptors())
    results.put((rank, outcome.reason, through_host, on_host, right, held))
    dist.destroy_process_group()


def descriptors() -> list[str]:
    """What this process holds open."""
    folder, names = "/proc/self/fd", []
    for number in os.listdir(folder):
        with contextlib.suppress(OSError):  # the listing's own
            names.append(os.readlink(f"{folder}/{number}"))
    return names


def started(tmp_path, fail=None, ranks=2) -> list[tuple]:
    results = FORK.SimpleQueue()
    processes = [
        FORK.Process(
            target=start, args=(rank, ranks, str(tmp_path / "init"), 6, fail, results), daemon=True
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = sorted(results.get() for _ in processes)
    for process in processes:
        process.join()
    assert not list(host_file.SHARED.glob(f"{host_file.PREFIX}{processes[0].pid}-*"))
    return found


def test_ranks_set_it_up_and_sum_through_it(tmp_path):
    assert started(tmp_path) == [(rank, "", True, True, True, 1) for rank in range(2)]


def no_room_for_the_first(rank: int) -> None:
    def refuse(*_):
        raise OSError("No space left on device")

    if rank == 0:
        host_file.attach = refuse


def no_room(rank: int) -> None:
    def refuse(*_):
        raise OSError("No space left on device")

    if rank == 1:
        host_file.attach = refuse


def no_file(rank: int) -> None:
    def refuse(*_):
        raise OSError("No space left on device")

    host_file.create = refuse


def wrong_bits(rank: int) -> None:
    original = host_start.cases_of

    def planted(rows, sums):
        first, *rest = original(rows, sums)
        if rank == 1:
            first.total[0, 0] += 1
        return [first, *rest]

    host_start.cases_of = planted


def no_registration(rank: int) -> None:
    def refuse(*_):
        raise RuntimeError("cudaHostRegister: operation not permitted")

    if rank == 0:
        host_start.register = refuse


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (no_room, "rank 1 could not"),
        (no_room_for_the_first, "rank 0 could not"),
        (no_file, "rank 0 could not"),
        (wrong_bits, "rank 1 could not"),
        (no_registration, "rank 0 could not"),
    ],
)
def test_what_one_rank_cannot_do_all_do_without(tmp_path, fail, reason):
    assert started(tmp_path, fail) == [(rank, reason, False, False, True, 0) for rank in range(2)]


def test_rows_that_cannot_be_divided_are_left_to_slices(tmp_path):
    want = "it takes 2 to 8 ranks that divide 128 columns"
    assert started(tmp_path, ranks=3) == [(rank, want, False, False, True, 0) for rank in range(3)]


def publish_once(name: str, rows: torch.Tensor, late: bool) -> None:
    torch.set_num_threads(1)
    mapped = host_file.attach(name, rank_sum.LAYOUT, 1)
    control = torch.tensor([1 << 60, 0])
    rank_sum.publish(rows, views(mapped, rank_sum.LAYOUT), control, rank_sum.BEGIN, 1, late)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("late", [False, True])
def test_the_bench_publishes_what_its_consumer_expects(rows, late):
    """One sum only: the interpreter runs the programs of the seven one after the other."""
    layout, consumer = rank_sum.LAYOUT, rank_sum.CONSUMER
    generator = torch.Generator().manual_seed(rows)
    payload = torch.randn(8, rows, layout.columns, generator=generator).bfloat16()
    name = host_file.create(layout)
    mapped = host_file.attach(name, layout, consumer)
    try:
        views(mapped, layout).flag.fill_(rank_sum.BEGIN)
        end = host_sum_of(mapped, layout, consumer, CPU, rank_sum.BEGIN)
        others = FORK.Process(target=publish_once, args=(name, payload, late), daemon=True)
        others.start()
        total = end(payload[consumer])
        others.join()
        assert torch.equal(total, rank_sum.expected_total(payload))
    finally:
        host_file.remove(name)
