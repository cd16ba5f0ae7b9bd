"""Slots: who holds what, and generations that never come back."""

import pytest
import torch

from dspark.state import SlotError, SlotTable


def generations(table):
    return table.generation.tolist()


def test_assignment_counts_a_generation_and_queues_the_ring_once():
    table = SlotTable(3)
    table.assigned([2, 1])
    table.released([2])
    table.assigned([2])
    assert generations(table) == [0, 1, 2, 0]
    assert table.take_pending() == [2, 1]
    assert table.take_pending() == []


@pytest.mark.parametrize("slots", [[0], [4], [-1], [1, 1], [2, 0]])
def test_refused_assignment_changes_nothing(slots):
    table = SlotTable(3)
    with pytest.raises(SlotError):
        table.assigned(slots)
    assert generations(table) == [0, 0, 0, 0]
    assert table.held == set()
    assert table.pending == []


def test_double_assignment_names_slot_and_generation():
    table = SlotTable(3)
    table.assigned([3])
    with pytest.raises(SlotError, match=r"slot 3 .* generation 1"):
        table.assigned([3])


@pytest.mark.parametrize("slots", [[0], [4], [2], [1, 1], [1, 2]])
def test_refused_release_changes_nothing(slots):
    table = SlotTable(3)
    table.assigned([1])
    with pytest.raises(SlotError):
        table.released(slots)
    assert table.held == {1}


def test_stale_generation_stays_stale_across_reuse_and_flush():
    table = SlotTable(3)
    table.assigned([1])
    slot, first = torch.tensor([1]), table.generation[[1]].clone()
    assert table.current(slot, first).tolist() == [True]
    table.released([1])
    assert table.current(slot, first).tolist() == [False]
    for _ in range(3):
        table.assigned([1])
        assert table.current(slot, first).tolist() == [False]
        assert table.current(slot, table.generation[slot]).tolist() == [True]
        table.reset()
        assert table.current(slot, first).tolist() == [False]
    assert generations(table) == [0, 7, 3, 3]


def test_padding_and_unknown_slots_are_never_current():
    table = SlotTable(3)
    table.assigned([1])
    slots = torch.tensor([0, -1, 9, 1], dtype=torch.int32)
    assert table.current(slots, torch.tensor([0, 0, 0, 1])).tolist() == [False, False, False, True]


def test_flush_queues_every_ring():
    table = SlotTable(3)
    table.reset()
    assert table.take_pending() == [1, 2, 3]
