"""Slots of the paged allocators: against SGLang's own slow routine, and frees inside a group."""

import random

import pytest
import torch
from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

from dspark.host.allocator import DSparkAllocator, HostWindowAllocator, extend_slots
from dspark.host.pools import WindowPool
from dspark.state import PageError, StateGeometry, StateLifecycle

PAGE = 256


def random_batch(rng: random.Random, pages: int):
    """A few requests whose open page ends at `last_loc`, and a shuffled free list."""
    free = torch.tensor(rng.sample(range(1, pages), pages - 1))
    prefix, seq, last = [], [], []
    for _ in range(rng.randint(1, 6)):
        start = rng.choice([0, 1, 255, 256, 257, 300, 511, 512])
        prefix.append(start)
        seq.append(start + rng.choice([1, 2, 6, 255, 256, 257, 700]))
        page = 1000 + len(prefix)
        last.append(page * PAGE + (start - 1) % PAGE if start else -1)
    return (*map(torch.tensor, (prefix, seq, last)), free)


def test_extend_slots_equals_sglangs_loop():
    rng = random.Random(0)
    for _ in range(200):
        prefix, seq, last, free = random_batch(rng, 64)
        total = int((seq - prefix).sum())
        expected = torch.empty(total, dtype=torch.int64)
        alloc_extend_naive(prefix, seq, last, free, expected, PAGE, "cpu")
        assert extend_slots(prefix, seq, last, free, PAGE, total).equal(expected)


def life_cycle(pages: int, debug: bool) -> StateLifecycle:
    sizes = StateGeometry.for_model(
        slots=1,
        window_pages=pages,
        verify_width=6,
        c4_layers=1,
        c128_layers=1,
        head_dim=2,
        index_dim=1,
    )
    return StateLifecycle(sizes, "cpu", debug=debug)


def recorded(state: StateLifecycle) -> list[int]:
    """Pages whose clear is still to come."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *state.pages.pending_on_host()]).tolist()


def window_allocator(state: StateLifecycle) -> HostWindowAllocator:
    made = HostWindowAllocator(6 * PAGE, PAGE, torch.float32, "cpu", None, False)
    made.report_to(state.pages)
    return made


def test_every_release_path_of_sglang_is_recorded():
    state = life_cycle(6, debug=False)
    window = window_allocator(state)
    assert recorded(state) == []
    slots = window.alloc(6 * PAGE)
    pages = [slots[i * PAGE : (i + 1) * PAGE] for i in range(6)]
    window.free(pages[0][:5])
    window.free_segment(pages[1], start_pos=PAGE)
    window.free_group_begin()
    window.free(pages[2])
    window.free_segment(torch.cat(pages[3:5]), start_pos=0)
    assert recorded(state) == [1, 2]
    window.free_group_end()
    assert sorted(recorded(state)) == [1, 2, 3, 4, 5]
    assert state.begin_forward() == 1
    window.clear()
    assert recorded(state) == [1, 2, 3, 4, 5, 6]


def test_debug_refuses_a_page_nobody_owns():
    state = life_cycle(6, debug=True)
    window = window_allocator(state)
    slots = window.alloc(2 * PAGE)
    window.free(slots[:PAGE])
    with pytest.raises(PageError, match="window page 1 is released but nobody owns it"):
        window.free(slots[:1])
    assert recorded(state) == [1]


def make_allocator(pages: int = 8) -> DSparkAllocator:
    pool = WindowPool(pages * PAGE, pages * PAGE, 1, torch.uint8, "cpu")
    pool.state = life_cycle(pages, debug=False)
    return DSparkAllocator(pages * PAGE, pages * PAGE, PAGE, torch.uint8, "cpu", pool, False)


def take(allocator: DSparkAllocator, tokens: int) -> torch.Tensor:
    zero, length = torch.tensor([0]), torch.tensor([tokens])
    return allocator.alloc_extend(zero, zero, length, length, torch.tensor([-1]), tokens)


def test_free_returns_full_and_window_pages():
    allocator = make_allocator()
    slots = take(allocator, 600)
    assert allocator.full_available_size() == allocator.swa_available_size() == 5 * PAGE
    allocator.free(slots)
    assert allocator.full_available_size() == allocator.swa_available_size() == 8 * PAGE


def test_group_free_releases_the_window_page_held_when_it_was_requested():
    """Inside the group the prefix cache points the freed full slots at a replacement page."""
    allocator = make_allocator()
    slots = take(allocator, PAGE)
    old = allocator.full_to_swa_index_mapping[slots].clone()
    replacement = allocator.swa_attn_allocator.alloc(PAGE)
    allocator.free_group_begin()
    allocator.free(slots)
    allocator.full_to_swa_index_mapping[slots] = replacement
    allocator.free_group_end()
    free_pages = set(allocator.swa_attn_allocator.free_pages.tolist())
    assert int(old[0]) // PAGE in free_pages
    assert int(replacement[0]) // PAGE not in free_pages
    assert recorded(allocator.get_kvcache().state) == [int(old[0]) // PAGE]


def test_a_page_freed_in_pieces_inside_a_group_returns_once():
    allocator = make_allocator()
    slots = take(allocator, PAGE)
    allocator.free_group_begin()
    allocator.free(slots[:100])
    allocator.free(slots[100:])
    allocator.free_group_end()
    assert sorted(allocator.swa_attn_allocator.free_pages.tolist()) == list(range(1, 9))
    assert sorted(allocator.full_attn_allocator.free_pages.tolist()) == list(range(1, 9))


def test_exhausted_pool_returns_none_and_keeps_its_pages():
    allocator = make_allocator(pages=2)
    assert take(allocator, 3 * PAGE) is None
    assert allocator.full_available_size() == 2 * PAGE
