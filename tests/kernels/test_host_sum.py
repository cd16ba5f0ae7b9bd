"""The sum through host memory on a CPU: its layout, its file and its protocol, faults included."""

import multiprocessing
import os
import random
import signal
import time
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.kernels.collective import host_file, host_layout, host_reference, ordered_sum
from dspark.kernels.collective.host_layout import (
    CHANNELS,
    MOST_ROWS,
    PUBLISHED,
    REDUCED,
    Layout,
    fits,
    flag_of,
    has_arrived,
    slot_of,
    views,
)
from dspark.kernels.collective.host_reference import Member, member, programs

COLUMNS = 64


# --- layout -------------------------------------------------------------------------------------


def test_layout_of_eight_ranks_by_hand():
    """4096 columns are 2048 words; 64 + 8 + 17 * 2 * 3 * 8 = 888 common words; three slots of 65
    rows and three parts of 64 rows of 256 words are 448,512 words, 438 pages, a rank."""
    layout = Layout(8, 4096)
    assert (layout.row_words, layout.slice_words) == (2048, 256)
    assert (layout.slot_words, layout.part_words) == (133_120, 16_384)
    assert layout.common_bytes == 4096
    assert layout.own_bytes == 438 * 4096
    assert layout.nbytes == 4096 + 8 * 438 * 4096
    assert layout.own_start(3) == 4096 + 3 * 438 * 4096


def test_places_by_hand():
    layout = Layout(8, 4096)
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    v = views(memory, layout)

    def at(word: torch.Tensor) -> int:
        return word.data_ptr() - memory.data_ptr()

    assert at(v.fault[3, 5]) == 4 * 29
    assert at(v.serving) == 4 * 64
    assert at(v.flag[0, PUBLISHED, 0, 7]) == 4 * (72 + 7)
    assert at(v.flag[2, REDUCED, 1, 5]) == 4 * (72 + 2 * 48 + 24 + 8 + 5)
    own = 4096 + 3 * 438 * 4096
    assert at(v.slot[3, 2, 10, 7]) == own + 4 * (2 * 133_120 + 10 * 2048 + 7)
    assert at(v.part[3, 2, 10, 7]) == own + 4 * (3 * 133_120 + 2 * 16_384 + 10 * 256 + 7)


@settings(max_examples=20)
@given(ranks=st.integers(2, 8), slices=st.integers(1, 6))
def test_no_two_places_share_a_word(ranks, slices):
    layout = Layout(ranks, 8 * ranks * slices)
    assert fits(*layout)
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for view in views(memory, layout):
        view += 1
    assert memory.view(torch.int32).max() == 1
    own = layout.own_start(ranks - 1)
    views(memory, layout).slot[ranks - 1] = 0
    views(memory, layout).part[ranks - 1] = 0
    assert memory[own:].count_nonzero() == 0
    assert memory[own - layout.own_bytes : own].count_nonzero() > 0


def test_rows_that_do_not_fit():
    assert fits(8, 4096)
    assert fits(2, 16)
    assert not fits(1, 4096)
    assert not fits(9, 9 * 8 * 4)
    assert not fits(3, 4096)
    assert not fits(8, 4096 + 8)


def test_flags_are_compared_on_a_circle():
    assert [flag_of(e) for e in (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32)] == [
        0, 1, 2**31 - 1, -(2**31), -1, 0,
    ]  # fmt: skip
    for epoch in (1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 5 * 2**32):
        for apart in (0, 1, 3, 1000):
            assert has_arrived(flag_of(epoch + apart), epoch)
        for apart in (1, 3, 1000):
            assert not has_arrived(flag_of(epoch - apart), epoch)


@given(st.integers(0, 2**40))
def test_three_epochs_in_a_row_never_share_a_slot(epoch):
    assert len({slot_of(epoch + i) for i in range(3)}) == 3


def test_slots_of_32_bit_epochs_would_meet():
    last = 2**32 - 1
    assert last % 3 == ((last + 1) % 2**32) % 3
    assert slot_of(last) != slot_of(last + 1)


# --- all ranks of one process, in an order drawn at random ----------------------------------------


class World:
    """Ranks in one process, over fresh memory whose counters begin at `epoch`."""

    def __init__(self, ranks: int, epoch: int = 0, limit: float = float("inf")):
        self.layout = Layout(ranks, 8 * ranks * 2)
        self.memory = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
        views(self.memory, self.layout).flag.fill_(flag_of(epoch))
        self.clock = count()  # every look at it is a tick
        self.members = [
            member(
                self.memory, self.layout, rank, lambda: next(self.clock), limit, [epoch] * CHANNELS
            )
            for rank in range(ranks)
        ]

    def partials(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        """[ranks, rows, columns] of many magnitudes."""
        shape = (self.layout.ranks, rows, self.layout.columns)
        sizes = torch.randn(shape, generator=generator).exp2()
        return (torch.randn(shape, generator=generator) * sizes).bfloat16()

    def sums(
        self, many: list[torch.Tensor], chance: random.Random, absent: tuple[int, ...] = ()
    ) -> list[torch.Tensor]:
        """Every rank's sums of all `many`, each [ranks, rows, columns], as fast as the order drawn
        from `chance` lets it go: [ranks, rows, columns] by sum."""
        outs = [torch.full_like(partials, torch.nan) for partials in many]
        ranks = [rank for rank in range(self.layout.ranks) if rank not in absent]
        running: dict[int, list] = {rank: [] for rank in ranks}
        begun = dict.fromkeys(ranks, 0)
        while ranks:
            rank = chance.choice(ranks)
            # A rank that is lucky goes a long way, so that fast and slow ones meet.
            for _ in range(chance.choice((1, 3, 40))):
                if not running[rank]:
                    if begun[rank] == len(many):
                        ranks.remove(rank)
                        break
                    i = begun[rank]
                    begun[rank] += 1
                    running[rank] = programs(many[i][rank], outs[i][rank], self.members[rank])
                program = chance.choice(running[rank])
                if next(program, program) is program:
                    running[rank].remove(program)
        return outs


def right(world: World, many: list[torch.Tensor], chance: random.Random) -> bool:
    """Whether all ranks get the oracle's bits for every sum."""
    for partials, outs in zip(many, world.sums(many, chance), strict=True):
        want = ordered_sum(partials).view(torch.int16)
        if not all(torch.equal(out.view(torch.int16), want) for out in outs):
            return False
    return True


def mixed(world: World, chance: random.Random, sums: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    return [world.partials(chance.choice((1, 1, 1, 2, 5, 8)), generator) for _ in range(sums)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("epoch", [0, 2**31 - 5, 2**32 - 5])
def test_every_rank_holds_the_ordered_sum_in_any_order(ranks, epoch):
    for seed in range(3):
        chance = random.Random(f"{ranks}/{epoch}/{seed}")
        world = World(ranks, epoch)
        assert right(world, mixed(world, chance), chance)


@pytest.mark.deep
@settings(max_examples=150)
@given(
    ranks=st.integers(2, 8),
    epoch=st.sampled_from([0, 2**31 - 5, 2**32 - 100, 2**32 - 5, 2**33 - 5]),
    seed=st.integers(0, 2**32),
    sums=st.integers(1, 30),
)
def test_every_rank_holds_the_ordered_sum_in_many_orders(ranks, epoch, seed, sums):
    world, chance = World(ranks, epoch), random.Random(seed)
    assert right(world, mixed(world, chance, sums), chance)


def test_a_row_has_the_same_bits_alone_among_others_and_in_any_place():
    world, chance = World(4), random.Random(1)
    generator = torch.Generator().manual_seed(1)
    many = world.partials(48, generator)
    order = torch.randperm(48, generator=generator)
    alone = [many[:, row : row + 1] for row in range(0, 48, 7)]
    whole, permuted, *rows = world.sums([many, many[:, order], *alone], chance)
    want = ordered_sum(many)
    assert torch.equal(whole, want.expand(4, -1, -1))
    assert torch.equal(permuted, want[order].expand(4, -1, -1))
    for place, row in zip(range(0, 48, 7), rows, strict=True):
        assert torch.equal(row, want[place : place + 1].expand(4, -1, -1))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 63, MOST_ROWS])
def test_rows_of_every_group_arrive(rows):
    world, chance = World(2), random.Random(rows)
    assert right(world, [world.partials(rows, torch.Generator().manual_seed(rows))], chance)


# --- a rank that does not come --------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 6])
def test_a_rank_that_never_arrives_is_noted_in_time(rows):
    world, chance = World(4, limit=500), random.Random(0)
    many = [world.partials(rows, torch.Generator().manual_seed(0)) for _ in range(3)]
    outs = world.sums(many, chance, absent=(2,))
    assert next(world.clock) < 10_000
    present = [0, 1, 3]
    assert all(out[present].isnan().all() for out in outs)
    fault = world.members[0].views.fault
    assert fault[present, 2].bool().any()
    assert fault.nonzero()[:, 1].unique().tolist() == [2]
    world.members[0].views.serving[0] = 1
    found = host_file.read_fault(bytes(world.memory[: 4 * host_layout.HEAD_WORDS].tolist()))
    assert found is not None
    assert found.missing == 2
    assert set(found.waited) <= set(present)


def test_who_is_named():
    head = torch.zeros(host_layout.HEAD_WORDS, dtype=torch.int32)
    fault = head[:64].view(8, 8)

    def found():
        return host_file.read_fault(bytes(head.view(torch.uint8).tolist()))

    fault[0, 1] = 5
    assert found() is None  # a test at start
    head[64] = 1
    assert found() == host_file.Fault(1, [0])
    fault[[1, 3], 6] = 1
    assert found() == host_file.Fault(6, [1, 3])
    fault.zero_()
    assert found() is None


# --- mutations: the tests above can fail ----------------------------------------------------------


def flag_before_rows(partial, out, m: Member):
    """As if the flag were not released behind the rows."""
    channel, epoch = 0, m.epochs[0] + 1
    m.views.flag[channel, PUBLISHED, slot_of(epoch), m.rank] = flag_of(epoch)
    yield
    yield from one_shot(partial, out, m)


one_shot = host_reference.one_shot


def no_flag(channel, phase, epoch, m: Member):
    flags = m.views.flag[channel, phase, slot_of(epoch)]
    before = int(flags[m.rank])
    for _ in meet(channel, phase, epoch, m):
        flags[m.rank] = before
        yield


meet = host_reference.meet


def swapped(gathered):
    return ordered_sum(gathered[[1, 0, 2, 4, *range(4, len(gathered))][: len(gathered)]])


def forgets_the_second_wait(channel, phase, epoch, m: Member):
    if phase == PUBLISHED:
        yield from meet(channel, phase, epoch, m)
    else:
        m.views.flag[channel, phase, slot_of(epoch), m.rank] = flag_of(epoch)
        yield


MUTATIONS = {
    "the flag is not released behind the rows": ("one_shot", flag_before_rows),
    "nobody waits for the columns of the sum": ("meet", forgets_the_second_wait),
    "two slots made one": ("slot_of", lambda epoch: min(epoch % 3, 1)),
    "one slot": ("slot_of", lambda epoch: 0),
    "ranks swapped in the sum": ("ordered_sum", swapped),
    "slots by the low 32 bits": ("slot_of", lambda epoch: (epoch % 2**32) % 3),
    "epochs compared without the circle": (
        "has_arrived",
        lambda flag, epoch: flag % 2**32 >= epoch % 2**32,
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_is_caught(mutation, monkeypatch):
    name, mutant = MUTATIONS[mutation]
    monkeypatch.setattr(host_reference, name, mutant)
    for seed in range(200):
        chance = random.Random(seed)
        world = World(8, epoch=2**32 - 6, limit=20_000)
        if not right(world, mixed(world, chance), chance):
            return
    pytest.fail("every sum was right")


def test_no_release_is_a_fault(monkeypatch):
    monkeypatch.setattr(host_reference, "meet", no_flag)
    world, chance = World(2, limit=200), random.Random(0)
    many = [world.partials(1, torch.Generator().manual_seed(0))]
    assert not right(world, many, chance)
    assert world.members[0].views.fault.any()


# --- real processes over one file -----------------------------------------------------------------


def known(ranks: int, rows: int, number: int) -> torch.Tensor:
    """bf16 [ranks, rows, COLUMNS] of sum `number`, the same in every process."""
    shape = (ranks, rows, COLUMNS)
    generator = torch.Generator().manual_seed(number)
    sizes = torch.randn(shape, generator=generator).exp2()
    return (torch.randn(shape, generator=generator) * sizes).bfloat16()


PAIR = Layout(2, COLUMNS)


def begin(mapped: torch.Tensor, rank: int, epoch: int, limit: float) -> Member:
    return member(mapped, PAIR, rank, time.monotonic, limit, [epoch] * CHANNELS)


def sum_many(name: str, rank: int, epoch: int, sums: int, results) -> None:
    """One rank: reports the number of its first wrong sum, or None."""
    torch.set_num_threads(1)
    m = begin(host_file.attach(name, PAIR, rank), rank, epoch, limit=60)
    late, sizes = random.Random(rank), random.Random(0)
    wrong = None
    for number in range(sums):
        rows = sizes.choice((1, 1, 2, 6, 9))
        partials = known(2, rows, number)
        out = torch.empty_like(partials[0])
        if late.random() < 0.1:
            time.sleep(late.random() / 1000)
        for program in programs(partials[rank], out, m):
            for _ in program:
                if late.random() < 0.02:
                    os.sched_yield()
        if wrong is None and not torch.equal(out, ordered_sum(partials)):
            wrong = number
    results.put(wrong)


@pytest.fixture
def shared():
    """Name of a file for PAIR."""
    name = host_file.create(PAIR)
    yield name
    host_file.remove(name)


@pytest.fixture
def mapped(shared):
    """The file as rank 0 maps it."""
    return host_file.attach(shared, PAIR, 0)


FORK = multiprocessing.get_context("fork")


def run_ranks(name: str, mapped: torch.Tensor, epoch: int, sums: int) -> list[int | None]:
    views(mapped, PAIR).flag.fill_(flag_of(epoch))
    results = FORK.SimpleQueue()
    ranks = [
        FORK.Process(target=sum_many, args=(name, rank, epoch, sums, results), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    found = [results.get() for _ in ranks]
    for process in ranks:
        process.join()
    return found


def test_processes_sum_over_one_file(shared, mapped):
    assert run_ranks(shared, mapped, epoch=2**32 - 100, sums=300) == [None, None]


@pytest.mark.deep
def test_processes_sum_many_times(shared, mapped):
    assert run_ranks(shared, mapped, epoch=2**32 - 100, sums=10_000) == [None, None]


def test_a_process_that_never_arrives_is_found_through_one_that_waited(shared, mapped):
    m = begin(mapped, 0, epoch=0, limit=0.05)
    m.views.serving[0] = 1
    out = torch.empty(1, COLUMNS, dtype=torch.bfloat16)
    assert host_file.fault_of(os.getpid()) is None
    host_reference.run(programs(known(2, 1, 0)[0], out, m))
    assert out.isnan().all()
    host_file.remove(shared)  # as at start: found by its descriptor
    assert host_file.fault_of(os.getpid()) == host_file.Fault(1, [0])


def hold(name: str, ready) -> None:
    mapped = host_file.attach(name, PAIR, 1)
    mapped[-1] = 1
    ready.put(True)
    signal.pause()


def test_a_killed_process_leaves_no_file(shared):
    ready = FORK.SimpleQueue()
    holder = FORK.Process(target=hold, args=(shared, ready), daemon=True)
    holder.start()
    ready.get()
    host_file.remove(shared)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert not [file for file in host_file.SHARED.glob(f"{host_file.PREFIX}{os.getpid()}-*")]


def test_a_second_server_has_a_file_of_its_own(mapped):
    name = host_file.create(PAIR)
    other = host_file.attach(name, PAIR, 0)
    host_file.remove(name)
    mapped.fill_(1)
    assert other.count_nonzero() == 0


def test_a_file_that_is_not_there_is_an_error():
    with pytest.raises(FileNotFoundError):
        host_file.attach(f"{host_file.PREFIX}nobody", PAIR, 0)
