"""Scenarios of the state life cycle, each with the rows and entries it must give.

More of them: `test_lifecycle_mutations`, `test_state_check`, `test_ring_geometry` and
`test_state_with_compressors`; failed loads once more on SGLang's own controller in
`test_host_tier`.
"""

import random

import pytest
import torch
from simulation.checks import Violation
from simulation.device import differing
from simulation.driver import operate
from simulation.server import LOAD_STEPS, Request, Server, prompt
from simulation.workload import Job, entries, serve

from dspark.kernels.step import BatchRows, Bounds, Rings, Tables, step_meta
from dspark.state import StateGeometry, StateGeometryError, StateLifecycle

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])


def verify_plan(start: int, length: int, ring_c128: int = 256):
    """A verify of slot 3, whose window pages are 5, 6, 7, with C4 rings of 16."""
    token_table = torch.zeros(5, 768, dtype=torch.int32)
    pos = torch.arange(768)
    token_table[3] = (5 + pos // 256) * 256 + pos % 256
    return step_meta(
        BatchRows(torch.tensor([3]), torch.tensor([start]), torch.tensor([length]), length),
        Tables(token_table, torch.arange(2048)),
        Bounds(128, 3, 6),
        Rings(16, ring_c128),
        store_all=True,
    )


def closing(meta, entry) -> list[int]:
    """Positions at which an entry closes."""
    return meta.pos[entry >= 0].tolist()


def emptied(start: int, commit: int, ring: int = 256) -> list[int]:
    """C128 rows the rollback of a six-row verify of slot 3 empties."""
    sizes = StateGeometry.for_model(
        slots=4, window_pages=1, verify_width=6, c4_layers=1, c128_layers=2, head_dim=1, index_dim=1
    )
    c128 = sizes.c128.__class__(ratio=128, window=128, ring=ring, width=2, layers=2)
    state = StateLifecycle(sizes.__class__(**{**vars(sizes), "c128": c128}), "cpu")
    pool = state.pools.tensors["c128"]
    pool.fill_(1.0)
    before = pool.clone()
    one = [torch.tensor([n]) for n in (3, start, commit, 6)]
    state.rollback.after_verify(*one)
    return sorted(differing(pool, before))


def started(length: int, **server) -> tuple[Server, Request]:
    """A server with one request of `length` tokens past its prefill."""
    served = Server(**server)
    request = admitted(served, 0, length)
    served.chunk(length)
    served.settle()
    return served, request


def admitted(server: Server, family: int, length: int, fail_load: int | None = None) -> Request:
    request = server.admit(prompt(family, length), fail_load)
    assert request is not None
    return request


def readmitted(server: Server) -> Request:
    request = server.readmit()
    assert request is not None
    return request


def generate(server: Server, request: Request, tokens: int, commits=(6, 1, 3)) -> None:
    """Verify until the request has `tokens` more tokens."""
    goal, step = request.host_len + tokens, 0
    rows = server.state.geometry.verify_width
    while request.host_len < goal:
        server.verify([commits[step % len(commits)]], [rows])
        server.check()
        step += 1


def first_entries(server: Server, request: Request, count: int = 20) -> list[torch.Tensor]:
    """The first `count` C4 entries the request generated after its prompt, and all C128 ones."""
    pools = entries(server, request, request.goal // 4 * 4 + 4 * count)
    return [pool[:, -count:] if pool.shape[2] == 8 else pool for pool in pools]


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("commit", range(1, 7))
def test_verify_across_128(commit):
    meta = verify_plan(126, 6)
    assert meta.c128_store.tolist() == [894, 895, 896, 897, 898, 899]
    assert meta.c4_store.tolist() == [94, 95, 80, 81, 82, 83]
    assert closing(meta, meta.c4_entry) == [127, 131]
    assert closing(meta, meta.c128_entry) == [127]
    assert emptied(126, commit) == list(range(894 + commit, 900))


@BOTH
def test_an_entry_closed_by_its_commit_is_final(overlap):
    server, request = started(127, overlap=overlap)
    server.verify([1], [6])
    server.settle()
    assert request.host_len == 128
    entry = entries(server, request, 128)[2]
    server.verify([6], [6])
    server.settle()
    assert torch.equal(entries(server, request, 128)[2], entry)
    server.check()


def test_an_entry_of_rejected_drafts_is_formed_again():
    server, request = started(125)
    server.verify([2], [6])
    rejected = entries(server, request, 128)[2]
    server.verify([3], [6])
    assert request.host_len == 130
    committed = entries(server, request, 128)[2]
    assert not torch.equal(rejected, committed)
    assert committed[0, 0, 127] == request.sequence.values[127] + 4 * (1 << 21)


def test_verify_across_a_page():
    meta = verify_plan(254, 6)
    assert meta.c128_store.tolist() == [1022, 1023, 768, 769, 770, 771]
    assert meta.c4_store.tolist() == [94, 95, 96, 97, 98, 99]
    assert closing(meta, meta.c128_entry) == [255]
    assert meta.c128_entry[1] == 5 * 2 + 1
    assert emptied(254, 2) == [768, 769, 770, 771]


@pytest.mark.parametrize(
    ("ring", "start", "rows"),
    [
        (256, 382, [894, 895, 896, 897, 898, 899]),
        (256, 510, [1022, 1023, 768, 769, 770, 771]),
        (136, 130, [538, 539, 540, 541, 542, 543]),
        (136, 134, [542, 543, 408, 409, 410, 411]),
    ],
)
def test_ring_wrap(ring, start, rows):
    assert verify_plan(start, 6, ring).c128_store.tolist() == rows
    assert emptied(start, 1, ring) == sorted(rows[1:])


@pytest.mark.parametrize("start", range(122, 131))
def test_every_commit_around_128(start):
    """All commits and widths at once, one request each; three further steps judge them."""
    for length in range(1, 7):
        server = Server(slots=6, full_pages=6, window_pages=6)
        for _ in range(length):
            server.admit(prompt(0, start))
        server.chunk(start, 6)
        server.verify([1 + i % length for i in range(length)], [length])
        for _ in range(3):
            server.verify([2, 6, 1, 4], [6])
        server.check()


@pytest.mark.parametrize("start", range(140, 144))
def test_every_commit_and_width_of_a_ring_of_16(start):
    for length in range(1, 11):
        server = Server(slots=10, full_pages=10, window_pages=10, verify_width=10)
        for _ in range(length):
            server.admit(prompt(0, start))
        server.chunk(start, 10)
        server.verify([1 + i % length for i in range(length)], [length])
        for _ in range(3):
            server.verify([2, 10, 1, 7], [10])
        server.check()
    with pytest.raises(StateGeometryError):
        Server(verify_width=11)


@pytest.mark.parametrize(
    ("fits", "breaks"),
    [
        ({"verify_width": 6, "c128": 132}, {"verify_width": 6, "c128": 131}),
        ({"verify_width": 10, "c128": 136}, {"verify_width": 11, "c128": 136, "c4": 32}),
        ({"verify_width": 11, "c128": 137, "c4": 32}, {"verify_width": 12, "c128": 137, "c4": 32}),
        ({"verify_width": 10, "c4": 16}, {"verify_width": 11, "c4": 16, "c128": 256}),
        ({"verify_width": 1, "c4": 8, "c128": 128}, {"verify_width": 6, "c4": 8}),
    ],
    ids=str,
)
def test_ring_bounds_are_tight(fits, breaks, monkeypatch):
    """One row more than the check allows really does corrupt entries."""

    def run(sizes):
        server, request = started(120, **sizes)
        generate(server, request, 20, commits=(1,))

    run(fits)
    with pytest.raises(StateGeometryError):
        run(breaks)
    monkeypatch.setattr(StateGeometry, "check", lambda self: None)
    with pytest.raises(Violation):
        run(breaks)


@BOTH
@pytest.mark.parametrize(
    ("commits", "lengths"),
    [([1], [6]), ([6], [6]), ([1, 6], [6]), ([3, 1, 6, 2, 5], [4, 1, 6, 3, 5])],
    ids=["accept_none", "accept_all", "alternate", "ragged"],
)
def test_400_tokens_of_each_accept_pattern(overlap, commits, lengths):
    server, request = started(40, overlap=overlap)
    step = 0
    while request.host_len < 440:
        server.verify([commits[step % len(commits)]], [lengths[step % len(lengths)]])
        step += 1
    server.check()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8])
def test_first_tokens(length):
    server, request = started(length)
    generate(server, request, 24)
    c4 = entries(server, request, 4)[0]
    assert (c4[:, 0, :4] == 0).all(), "window 0 overlaps nothing"


@BOTH
@pytest.mark.parametrize("length", [255, 256, 257, 259, 262, 511, 512, 516])
def test_cold_hit_and_host_round_trip_agree(length, overlap):
    server, cold = started(length, overlap=overlap)
    generate(server, cold, 90)
    expected = first_entries(server, cold)
    server.abort(cold)
    pages = (length - 1) // 256
    for round_trip in (False, True):
        if round_trip:
            server.settle()
            server.squeeze()
            assert all(node.full is None for node in server.tree.nodes())
        request = admitted(server, 0, length)
        assert request.host_len == pages * 256
        server.chunk(length)
        generate(server, request, 90)
        assert equal(first_entries(server, request), expected)
        server.abort(request)
    server.check()


@pytest.mark.parametrize("length", range(257, 263))
def test_duplicate_page_freed_in_flight(length):
    server = Server(overlap=True)
    a, b = admitted(server, 0, length), admitted(server, 0, length)
    server.chunk(length, 2)
    for _ in range(12):
        server.verify([2, 3], [6])
        server.check()
    assert a.full[0] == b.full[0], "the second request uses the tree's page"
    server.settle()


def test_slot_and_page_reused_while_the_last_step_is_in_flight():
    server, first = started(100, slots=1, full_pages=4, window_pages=4, overlap=True)
    server.verify([3], [6])
    slot, page = first.slot, first.swa[0]
    server.finish(first)
    server.verify([3], [6])  # the result of the step before ends the request, this one is in flight
    assert first not in server.live
    assert server.stream.executed < server.stream.launched
    second = admitted(server, 1, 100)
    server.chunk(100)
    assert (second.slot, second.swa[0]) == (slot, page)
    generate(server, second, 60)


@BOTH
def test_open_rows_of_an_earlier_owner_stay_invisible(overlap):
    server = Server(slots=1, overlap=overlap)
    for family, length in enumerate((300, 1, 129)):
        request = admitted(server, family, length)
        assert request.slot == 1
        server.chunk(length)
        generate(server, request, 20)
        server.abort(request)
        server.check()


@pytest.mark.parametrize("cut", [1, 3, 127, 128, 129, 255, 256, 257])
def test_chunk_cuts_agree(cut):
    whole, request = started(700)
    expected = entries(whole, request, 700)
    server = Server()
    request = admitted(server, 0, 700)
    for _ in range(3):
        server.chunk(cut)
    while not request.running:
        server.chunk(cut if cut > 100 else 233)
    assert equal(entries(server, request, 700), expected)
    generate(server, request, 12)


@BOTH
@pytest.mark.parametrize("same_slot", [True, False])
def test_abort_between_chunks(overlap, same_slot):
    server = Server(slots=2, overlap=overlap)
    victim = admitted(server, 0, 600)
    slot = victim.slot
    server.chunk(200)
    server.chunk(200)
    server.abort(victim)
    again = admitted(server, 0, 600)
    if same_slot:  # slots are handed out in turn
        server.abort(again)
        again = admitted(server, 0, 600)
    assert (again.slot == slot) == same_slot
    server.chunk(600)
    generate(server, again, 20)


@BOTH
@pytest.mark.parametrize(("length", "hit"), [(120, 0), (260, 256)])
def test_retract_with_rows_in_flight(length, hit, overlap):
    server, request = started(length, overlap=overlap)
    goal = 130 if hit == 0 else 300
    while request.host_len < goal:
        server.verify([2], [6])
    server.retract(request)
    again = readmitted(server)
    assert again.host_len == hit
    server.chunk(600)
    assert again.running
    generate(server, again, 30)


@BOTH
def test_five_retractions(overlap):
    server = Server(slots=1, overlap=overlap)
    request = admitted(server, 0, 130)
    for _ in range(5):
        server.chunk(600)
        server.verify([2], [6])
        server.retract(request)
        server.check()
        request = readmitted(server)
    assert server.state.slots.generation.tolist() == [0, 6]
    server.chunk(600)
    generate(server, request, 20)


def test_window_eviction():
    server, request = started(100)
    generate(server, request, 412)
    server.slide()
    assert [page is None for page in request.swa[:2]] == [request.host_len >= 512, False]
    generate(server, request, 8)
    server.slide()
    assert request.swa[0] is None
    assert request.swa[1] is not None
    generate(server, request, 200)


@BOTH
def test_tombstone_recovered_by_another_request(overlap):
    server, first = started(300, overlap=overlap)
    server.verify([1], [6])
    server.settle()
    server.abort(first)
    assert server.tombstone()
    (node,) = server.tree.nodes()
    assert node.swa is None
    second = admitted(server, 0, 300)
    assert second.host_len == 0, "a page without window rows is no hit"
    server.chunk(300)
    own = second.swa[0]
    server.verify([1], [6])
    server.settle()
    assert node.swa == own
    server.check()
    third = admitted(server, 0, 300)
    assert third.host_len == 256
    server.chunk(300)
    generate(server, third, 20)


@BOTH
@pytest.mark.parametrize("fail_at", range(len(LOAD_STEPS)), ids=lambda i: f"{LOAD_STEPS[i]}")
def test_failed_load_is_a_cold_run(fail_at, overlap):
    server, request = started(600, overlap=overlap)
    generate(server, request, 90)
    expected = first_entries(server, request)
    server.abort(request)
    server.settle()
    server.squeeze()
    before = server._memory()
    request = admitted(server, 0, 600, fail_at)
    assert server._memory() == before
    assert request.host_len == 0
    server.chunk(600)
    generate(server, request, 90)
    assert equal(first_entries(server, request), expected)


def test_load_into_a_page_whose_old_owner_is_in_flight():
    server, first = started(300, overlap=True, window_pages=4)
    server.settle()
    server.abort(first)
    server.squeeze()
    second = admitted(server, 1, 200)
    server.chunk(200)
    server.verify([2], [6])
    page = second.swa[0]
    server.abort(second)  # its verify is still in flight
    assert server.stream.executed < server.stream.launched
    third = admitted(server, 0, 300)
    assert third.host_len == 256
    assert third.nodes[0].swa == page, "the load took the page just released"
    server.chunk(300)
    generate(server, third, 40)


@BOTH
def test_flush_between_two_runs(overlap):
    server, request = started(260, overlap=overlap)
    generate(server, request, 90)
    expected = first_entries(server, request)
    slot, generation = torch.tensor([request.slot]), torch.tensor([request.generation])
    assert server.state.slots.current(slot, generation).item()
    server.abort(request)
    assert server.flush()
    request = admitted(server, 0, 260)
    assert request.slot == slot.item()
    assert not server.state.slots.current(slot, generation).item(), "a stale confidence counts"
    server.chunk(260)
    generate(server, request, 90)
    assert equal(first_entries(server, request), expected)


def test_memory_release_and_resume():
    server, request = started(260)
    generate(server, request, 90)
    expected = first_entries(server, request)
    server.abort(request)
    assert server.resume()
    request = admitted(server, 0, 260)
    server.chunk(260)
    generate(server, request, 90)
    assert equal(first_entries(server, request), expected)


def test_graph_padding_beside_poisoned_padding_owners():
    """Batch 3 in a bucket of 8, NaN in slot 0 and page 0."""
    jobs = [Job(tuple(prompt(i, 120 + i)), 40, (2, 6, 1)) for i in range(3)]
    results = [
        serve(Server(poisoned=poisoned, padding=padding), jobs, [0, 1, 2], 3)
        for poisoned, padding in ((False, 0), (True, 5))
    ]
    for number in range(3):
        assert equal(results[0][number], results[1][number])


def test_group_free_with_a_replacement_in_between(import_sglang):
    """The page that is released is the one held when the free was asked for, once."""
    import hicache_stack

    stack = hicache_stack.build()
    allocator, window = stack.allocator, stack.allocator.swa_attn_allocator
    zero, length = torch.tensor([0]), torch.tensor([256])
    slots = allocator.alloc_extend(zero, zero, length, length, torch.tensor([-1]), 256)
    old = int(allocator.full_to_swa_index_mapping[slots[0]]) // 256
    replacement = window.alloc(256)
    allocator.free_group_begin()
    allocator.free(slots)
    allocator.set_full_to_swa_mapping(slots, replacement)  # the prefix cache recovers a tombstone
    allocator.free_group_end()
    assert torch.cat(stack.state.pages.pending_on_host()).tolist() == [old]
    free = window.free_pages.tolist()
    assert free.count(old) == 1
    assert int(replacement[0]) // 256 not in free
    assert (allocator.full_to_swa_index_mapping[slots] == replacement).all()


def test_verify_of_one_row_plans_what_decode_plans():
    token_slots = torch.arange(5 * 768, dtype=torch.int32).view(5, 768) % 2048
    memory = Tables(token_slots, torch.arange(2048)), Bounds(128, 3, 6), Rings(16, 136)
    requests = torch.tensor([1, 3, 4]), torch.tensor([127, 255, 300]), torch.tensor([1, 1, 1])
    decode = step_meta(BatchRows(*requests, 3), *memory, store_all=True)
    verify = step_meta(BatchRows(*requests, 18, 6), *memory, store_all=True)
    for name, rows in decode._asdict().items():
        got = getattr(verify, name)
        assert torch.equal(rows, got if name == "page_table" else got[::6]), name


@BOTH
def test_verify_of_one_row_leaves_the_state_of_decode(overlap):
    jobs = [Job(tuple(prompt(i, 126 + i)), 30, (1,)) for i in range(2)]
    wide = serve(Server(overlap=overlap), jobs, [0, 1], 2)
    narrow = serve(Server(overlap=overlap, verify_width=1, c4=8, c128=128), jobs, [0, 1], 2)
    for number in range(2):
        assert equal(wide[number], narrow[number])


@BOTH
@pytest.mark.parametrize(
    ("seeds", "events"), [(1, 250), pytest.param(20, 2000, marks=pytest.mark.deep)]
)
def test_long_random_runs(seeds, events, overlap):
    for seed in range(seeds):
        server = Server(slots=8, full_pages=16, window_pages=12, overlap=overlap)
        operate(server, random.Random(1000 + seed), events)


@BOTH
def test_ranks_that_see_the_same_events_stay_equal(overlap):
    ranks = [Server(overlap=overlap) for _ in range(2)]
    for rank in ranks:
        operate(rank, random.Random(7), 80)
    for kind, pool in ranks[0].state.pools.tensors.items():
        assert not differing(pool, ranks[1].state.pools.tensors[kind])
    assert ranks[0]._memory() == ranks[1]._memory()
    assert torch.equal(ranks[0].state.slots.generation, ranks[1].state.slots.generation)
