"""The properties that compare two whole runs, or one operation with a slow reference."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulation.device import differing, narrow_geometry
from simulation.driver import operate
from simulation.server import Server, prompt
from simulation.workload import Job, serve

from dspark.state import SlotTable, StateLifecycle


def fast_and_deep(examples: int):
    """Two copies of a `given` test: `examples` examples, and 2,000 under the deep marker."""

    def decorate(test):
        @pytest.mark.parametrize("count", [examples, pytest.param(2000, marks=pytest.mark.deep)])
        def run(count):
            settings(
                max_examples=count,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            )(test)()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


SIZES = narrow_geometry(slots=4, window_pages=6)
slots_or_padding = st.integers(-1, SIZES.slots)
lengths = st.integers(0, 1000)


def scribbled(seed: int) -> StateLifecycle:
    """Rows written by anybody, some with NaN."""
    state = StateLifecycle(SIZES, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for rows in state.pools.tensors.values():
        rows.copy_(torch.randn(rows.shape, generator=generator))
        rows[torch.rand(rows.shape, generator=generator) < 0.05] = torch.nan
    return state


def contents(state: StateLifecycle):
    return {kind: rows.clone() for kind, rows in state.pools.tensors.items()}


def changes(state: StateLifecycle, before) -> dict[str, set[int]]:
    return {kind: differing(rows, before[kind]) for kind, rows in state.pools.tensors.items()}


NOTHING: dict[str, set[int]] = {"c4": set(), "idx": set(), "c128": set()}


@st.composite
def rollbacks(draw):
    """Arguments of a rollback of a batch of distinct slots, some of it padding."""
    slots = draw(st.permutations(range(1, SIZES.slots + 1)))[: draw(st.integers(0, 4))]
    slots = [s if draw(st.booleans()) else -1 for s in slots]
    verify = [draw(st.integers(1, SIZES.verify_width)) for _ in slots]
    commit = [draw(st.integers(1, v)) for v in verify]
    start = [draw(lengths) for _ in slots]
    return slots, start, commit, verify


def roll_back(state, arguments):
    state.rollback.after_verify(*(torch.tensor(a, dtype=torch.int64) for a in arguments))


@fast_and_deep(60)
@given(st.integers(0, 9), rollbacks(), st.lists(st.integers(-1, 6)), st.sets(st.integers(1, 4)))
def test_I07_idempotence(seed, rollback, pages, slots):
    """Every clear and rollback twice is once, and on empty rows it is nothing."""

    def everything(state):
        roll_back(state, rollback)
        state.pages.release(torch.tensor(pages, dtype=torch.int64))
        state.slots.assigned(sorted(slots))
        state.begin_forward()
        state.slots.released(sorted(slots))

    state = scribbled(seed)
    everything(state)
    once = contents(state)
    everything(state)
    assert changes(state, once) == NOTHING
    empty = StateLifecycle(SIZES, "cpu")
    before = contents(empty)
    everything(empty)
    assert changes(empty, before) == NOTHING


@fast_and_deep(100)
@given(st.integers(0, 9), rollbacks())
def test_I08_rollback_locality(seed, arguments):
    state = scribbled(seed)
    before = contents(state)
    roll_back(state, arguments)
    ring = SIZES.c128.ring
    expected = {
        slot * ring + (start + offset) % ring
        for slot, start, commit, verify in zip(*arguments, strict=True)
        for offset in range(commit, verify)
        if slot > 0
    }
    assert changes(state, before) == NOTHING | {"c128": expected}
    assert (state.pools.tensors["c128"][:, sorted(expected), 0] == 0).all()


@fast_and_deep(100)
@given(st.lists(st.one_of(st.just("flush"), st.integers(-4, 4)), max_size=30))
def test_I10_generation_monotonic(events):
    """Positive assigns, negative releases. Every record stays stale once its owner is gone."""
    table = SlotTable(4)
    held: dict[int, int] = {}
    records: list[tuple[int, int]] = []
    for event in events:
        before = table.generation.clone()
        if event == "flush":
            table.reset()
            held.clear()
        elif event > 0 and event not in held:
            table.assigned([event])
            held[event] = int(table.generation[event])
            records.append((event, held[event]))
            assert held[event] == before[event] + 1
        elif event < 0 and -event in held:
            table.released([-event])
            del held[-event]
        assert (table.generation >= before).all()
        assert table.generation[0] == 0
        for slot, generation in records:
            current = table.current(torch.tensor([slot]), torch.tensor([generation])).item()
            assert current == (held.get(slot) == generation)


job = st.builds(
    Job,
    prompt=st.builds(prompt, st.integers(0, 1), st.sampled_from([1, 3, 126, 130, 254, 257, 300])),
    more=st.integers(6, 30),
    accepts=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    killed_after=st.none(),
)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@fast_and_deep(3)
@given(st.lists(job, min_size=2, max_size=5), st.data(), st.booleans())
def test_I11_permutation(jobs, data, overlap):
    """Forward, reversed and interleaved runs end in the same entries as runs without drafts."""
    order = list(range(len(jobs)))
    alone: dict[int, list[torch.Tensor]] = {}
    for number in order:
        server = Server(verify_width=1, c4=8, c128=128, full_pages=4, window_pages=4)
        alone |= serve(server, jobs, [number], 1)
    for arrangement, concurrency in (
        (order, 1),
        (order[::-1], 2),
        (data.draw(st.permutations(order)), 4),
    ):
        result = serve(Server(overlap=overlap), jobs, arrangement, concurrency)
        assert result.keys() == alone.keys()
        for number, entries in result.items():
            assert same(entries, alone[number]), f"job {number} in order {arrangement}"


@fast_and_deep(4)
@given(job, job, job, st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 20))
def test_I06_isolation(mine, other, changed, accepts, death):
    """What another request runs, accepts and when it dies changes nothing of mine."""
    variants = [
        [other, mine],
        [other._replace(accepts=accepts), mine],
        [changed, mine],
        [other._replace(killed_after=death), mine],
    ]
    results = [serve(Server(overlap=True), jobs, [0, 1], 2)[1] for jobs in variants]
    for result in results[1:]:
        assert same(result, results[0])


@fast_and_deep(8)
@given(st.integers(0, 2**32), st.integers(1, 5), st.booleans())
def test_I15_padding(seed, padding, overlap):
    """Padded requests and rows leave every bit of every pool as it is without them."""
    pools = []
    for rows in (0, padding):
        server = Server(overlap=overlap, padding=rows)
        operate(server, random.Random(seed), 25)
        pools.append({**server.state.pools.tensors, **server.device.entries})
    for kind, pool in pools[0].items():
        assert not differing(pools[1][kind], pool), kind
