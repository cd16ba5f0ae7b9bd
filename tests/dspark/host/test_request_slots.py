"""SGLang's table of request slots tells the state life cycle who holds which."""

from types import SimpleNamespace

import pytest

from dspark.host.request_slots import RequestSlots
from dspark.state import SlotError, SlotTable


def served(table: SlotTable) -> RequestSlots:
    pool = RequestSlots(size=3, max_context_len=8, device="cpu", enable_memory_saver=False)
    pool.report_to(table)
    return pool


def request():
    return SimpleNamespace(req_pool_idx=None, inflight_middle_chunks=0, kv_committed_len=0)


def test_new_owners_only_are_reported():
    table = SlotTable(3)
    pool = served(table)
    chunked, other = request(), request()
    pool.alloc([chunked])
    chunked.inflight_middle_chunks = 1
    pool.alloc([chunked, other])
    assert table.held == {chunked.req_pool_idx, other.req_pool_idx}
    assert table.generation.tolist() == [0, 1, 1, 0]
    assert pool.alloc([request(), request()]) is None
    assert table.held == {1, 2}
    pool.free(chunked)
    assert table.held == {2}
    assert table.free_list() == pool.free_slots == [3, 1]


def test_a_slot_that_nobody_holds_is_refused_and_stays_where_it_is():
    table = SlotTable(3)
    pool = served(table)
    req = request()
    pool.alloc([req])
    table.reset()
    with pytest.raises(SlotError, match="slot 1 is released but nobody holds it"):
        pool.free(req)
    assert pool.free_slots == [2, 3]


def test_a_flush_keeps_sglangs_generations_growing():
    table = SlotTable(3)
    pool = served(table)
    pool.alloc([request()])
    pool.clear()
    pool.alloc([request()])
    assert table.generation.tolist() == [0, 3, 1, 1]
    assert pool.req_generation.tolist() == [0, 3, 1, 1]
