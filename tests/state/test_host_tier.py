"""Loads from the host tier on SGLang's own controller: ordered, complete, all or nothing.

A request of 520 tokens is prefilled, its two full pages go to the host and leave the device, the
pages are soiled by somebody else, and the prefix comes back. Whatever happens on the way, the
request then continues exactly as the one that never left.
"""

import pytest
import torch
from compressor_run import Memory, entries, equal, forward, random_rows, weights

from dspark.state import HostLoadError, PageHostPool, StateError, hicache

PAGE, LENGTH, PREFIX, END = 256, 520, 512, 600
ROWS, DIRT = random_rows(1), random_rows(2)
WEIGHTS = weights()


@pytest.fixture
def stacks(import_sglang):
    import hicache_stack

    return hicache_stack


@pytest.fixture
def stack(stacks):
    stack = stacks.build()
    hicache.attach(stack.state.pages, stack.controller)
    return stack


def memory_of(stack) -> Memory:
    _, c4, c128 = stack.pool.layer_caches
    geometry = stack.state.geometry
    return Memory(
        window=c4.window,
        c4=c4.compressed,
        keys=c4.index,
        c128=c128.compressed,
        c4_ring=c4.state,
        keys_ring=c4.index_state,
        c128_ring=c128.state,
        ring_c4=geometry.c4.ring,
        ring_c128=geometry.c128.ring,
        window_table=stack.allocator.full_to_swa_index_mapping,
    )


def allocate(stack, tokens: int) -> torch.Tensor:
    zero, length = torch.tensor([0]), torch.tensor([tokens])
    slots = stack.allocator.alloc_extend(zero, zero, length, length, torch.tensor([-1]), tokens)
    assert slots is not None
    return slots


def pages_of(slots: torch.Tensor) -> list[int]:
    return (slots[::PAGE] // PAGE).tolist()


def run(stack, slot: int, pages: list[int], start: int, end: int, rows=ROWS) -> dict:
    """Forward positions start..end-1, verify-sized after LENGTH; returns the closed entries."""
    memory = memory_of(stack)
    stack.state.slots.assigned([slot])
    stack.state.begin_forward()
    forward(memory, WEIGHTS, slot, pages, start, rows.at(start, LENGTH - start), store_all=False)
    for position in range(LENGTH, end, 5):
        stack.state.begin_forward()
        forward(memory, WEIGHTS, slot, pages, position, rows.at(position, 5), store_all=True)
    stack.state.slots.released([slot])
    return entries(memory, pages, end)


def window_bytes(stack, full_page: int) -> torch.Tensor:
    swa = int(stack.allocator.full_to_swa_index_mapping[full_page * PAGE]) // PAGE
    return torch.stack([layer[swa] for layer in stack.pool.window])


def served_and_backed_up(stack, stacks):
    """Returns (entries of the cold run, window bytes of page 1, host slots full and window)."""
    slots = allocate(stack, END)
    cold = run(stack, 1, pages_of(slots), 0, END)
    last = window_bytes(stack, pages_of(slots)[1])
    swa = stack.allocator.full_to_swa_index_mapping[slots[PAGE:PREFIX]]
    bundle = stacks.transfers(stack, device_indices=swa)
    host = stack.controller.write(slots[:PREFIX], extra_pools=bundle)
    assert host is not None
    stack.allocator.free(slots)
    soiled = allocate(stack, END)
    run(stack, 2, pages_of(soiled), 0, END, DIRT)
    stack.allocator.free(soiled)
    return cold, last, host, bundle[0].host_indices


def load(stack, stacks, host, swa_host, without=()):
    """Returns (full slots, window slots) of the queued load, or (None, None)."""
    bundle = stacks.transfers(stack, without=without, host_indices=swa_host)
    full = stack.controller.load(host, extra_pools=bundle)
    if full is None:
        assert bundle[0].device_indices is None
        return None, None
    return full, bundle[0].device_indices


def free_pages(stack) -> tuple[list[int], list[int]]:
    allocator = stack.allocator
    full, window = allocator.full_attn_allocator, allocator.swa_attn_allocator
    return sorted(full.free_pages.tolist()), sorted(window.free_pages.tolist())


def continue_from(stack, full, swa) -> dict:
    """A request that hits the loaded prefix and prefills the rest."""
    stack.allocator.set_full_to_swa_mapping(full[PAGE:PREFIX], swa)
    pages = [*pages_of(full), *pages_of(allocate(stack, END - PREFIX))]
    return run(stack, 3, pages, PREFIX, END)


def test_round_trip_equals_a_cold_run(stack, stacks):
    cold, last_window, host, swa_host = served_and_backed_up(stack, stacks)
    full, swa = load(stack, stacks, host, swa_host)
    assert stack.controller.start_loading() >= 0
    result = continue_from(stack, full, swa)
    assert equal(result, cold)
    assert torch.equal(window_bytes(stack, pages_of(full)[1]), last_window)


def test_load_into_a_page_released_in_the_same_round(stack, stacks):
    """Its clear is pending when the load starts; the fence runs it first, not after the load."""
    cold, _, host, swa_host = served_and_backed_up(stack, stacks)
    pending = torch.cat(stack.state.pages.pending_on_host()).tolist()
    full, swa = load(stack, stacks, host, swa_host)
    assert int(swa[0]) // PAGE in pending
    stack.controller.start_loading()
    assert stack.state.pages.pending_on_host() == []
    assert equal(continue_from(stack, full, swa), cold)


def test_without_the_attach_the_pending_clear_wipes_the_load(stacks):
    """Tests the test above: SGLang's controller alone does not order loads behind clears."""
    stack = stacks.build()
    cold, _, host, swa_host = served_and_backed_up(stack, stacks)
    full, swa = load(stack, stacks, host, swa_host)
    stack.controller.start_loading()
    assert not equal(continue_from(stack, full, swa), cold)


@pytest.mark.parametrize("rows", ["deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state"])
def test_page_without_its_rows_is_a_miss(stack, stacks, rows):
    _, _, host, swa_host = served_and_backed_up(stack, stacks)
    before = free_pages(stack)
    assert load(stack, stacks, host, swa_host, without=(rows,)) == (None, None)
    assert free_pages(stack) == before
    slots = allocate(stack, PREFIX)
    swa = stack.allocator.full_to_swa_index_mapping[slots[PAGE:]]
    bundle = stacks.transfers(stack, without=(rows,), device_indices=swa)
    assert stack.controller.write(slots, extra_pools=bundle) is None


@pytest.mark.parametrize("rows", ["deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state"])
def test_without_the_attach_a_page_without_rows_corrupts(stacks, rows):
    """Tests the test above."""
    stack = stacks.build()
    cold, _, host, swa_host = served_and_backed_up(stack, stacks)
    full, swa = load(stack, stacks, host, swa_host, without=(rows,))
    stack.state.begin_forward()
    stack.controller.start_loading()
    assert not equal(continue_from(stack, full, swa), cold)


def cold_again(stack) -> dict:
    return run(stack, 4, pages_of(allocate(stack, END)), 0, END)


@pytest.mark.parametrize("exhausted", ["full_attn_allocator", "swa_attn_allocator"])
def test_I19_failed_allocation(stack, stacks, exhausted):
    cold, _, host, swa_host = served_and_backed_up(stack, stacks)
    allocator = getattr(stack.allocator, exhausted)
    taken = allocator.alloc(8 * PAGE)
    before = free_pages(stack)
    assert load(stack, stacks, host, swa_host) == (None, None)
    assert free_pages(stack) == before
    assert stack.controller.load_queue == []
    allocator.free(taken)
    assert equal(cold_again(stack), cold)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_I19_failed_copy(stack, stacks, layer, monkeypatch):
    """Layers below the failing one have been copied; their pages must come back empty."""
    cold, _, host, swa_host = served_and_backed_up(stack, stacks)
    before = free_pages(stack)
    _, swa = load(stack, stacks, host, swa_host)
    copy = stack.controller.mem_pool_host.load_to_device_per_layer

    def fail(device_pool, host_indices, device_indices, layer_id, *rest, **named):
        if layer_id == layer:
            raise OSError("host memory is gone")
        copy(device_pool, host_indices, device_indices, layer_id, *rest, **named)

    monkeypatch.setattr(stack.controller.mem_pool_host, "load_to_device_per_layer", fail)
    with pytest.raises(HostLoadError, match=r"nodes \[-1\] .*host memory is gone"):
        stack.controller.start_loading()
    monkeypatch.undo()
    assert free_pages(stack) == before
    assert stack.controller.load_queue == []
    queued = torch.cat(stack.state.pages.pending_on_host()).tolist()
    assert queued == [int(swa[0]) // PAGE]
    stack.state.begin_forward()
    stack.state.check()
    assert equal(cold_again(stack), cold)


def test_a_second_load_after_a_failed_one_succeeds(stack, stacks, monkeypatch):
    cold, _, host, swa_host = served_and_backed_up(stack, stacks)
    load(stack, stacks, host, swa_host)
    monkeypatch.setattr(
        stack.controller.mem_pool_host, "load_to_device_per_layer", lambda *a, **k: 1 / 0
    )
    with pytest.raises(HostLoadError):
        stack.controller.start_loading()
    monkeypatch.undo()
    full, swa = load(stack, stacks, host, swa_host)
    stack.controller.start_loading()
    assert equal(continue_from(stack, full, swa), cold)


def test_attach_refuses_a_tier_that_forgets_the_rows(stacks):
    stack = stacks.build()
    del stack.controller.mem_pool_host.entry_map[stack.names.DEEPSEEK_V4_C4_STATE]
    with pytest.raises(StateError, match=r"not their rows \['deepseek_v4_c4_state'\]"):
        hicache.attach(stack.state.pages, stack.controller)


def test_attach_refuses_releases_behind_the_allocator(stacks):
    stack = stacks.build()
    stack.controller.mem_pool_host.entry_map[stack.names.SWA].device_free_fn = lambda slots: None
    with pytest.raises(StateError, match="release window pages through the allocator"):
        hicache.attach(stack.state.pages, stack.controller)


def test_host_pool_hands_out_whole_pages():
    pool = PageHostPool([torch.zeros(3, 8, dtype=torch.uint8)], pages=2, page_size=4)
    with pytest.raises(ValueError, match="pages of 4, got 3"):
        pool.alloc(3)
    first, second = pool.alloc(4), pool.alloc(4)
    assert pool.alloc(4) is None
    pool.free(first)
    assert pool.available_size() == 4
    device = torch.tensor([8, 9, 10, 11])
    pool.device_pages[0][2] = 7
    pool.backup_from_device_all_layer(None, second, device, "direct")
    pool.device_pages[0].zero_()
    pool.load_to_device_per_layer(None, second, device - 4, 0, "direct")
    assert pool.device_pages[0].tolist() == [[0] * 8, [7] * 8, [0] * 8]
