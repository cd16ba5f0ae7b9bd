"""Releases record, the head of the next forward clears, and nothing else is touched."""

import pytest
import torch

from dspark.state import StateGeometry, StateLifecycle

SIZES = StateGeometry.for_model(
    slots=4, window_pages=6, verify_width=6, c4_layers=2, c128_layers=3, head_dim=2, index_dim=1
)


def filled(debug=False) -> StateLifecycle:
    """A life cycle in which every row has been written by somebody."""
    state = StateLifecycle(SIZES, "cpu", debug=debug)
    for rows in state.pools.tensors.values():
        rows.copy_(torch.arange(rows.numel()).view_as(rows) + 1)
    return state


def empty_owners(state, kind) -> list[int]:
    """Pages or slots whose rows are empty in every layer."""
    rows = state.pools.tensors[kind]
    half = rows.shape[-1] // 2
    empty = (rows[..., :half] == 0).all(-1) & (rows[..., half:] == -torch.inf).all(-1)
    by_owner = empty.view(rows.shape[0], -1, SIZES.ring(kind).ring).all(-1).all(0)
    return by_owner.nonzero().flatten().tolist()


def snapshot(state):
    return {kind: rows.clone() for kind, rows in state.pools.tensors.items()}


def unchanged(state, before) -> bool:
    return all(torch.equal(rows, before[kind]) for kind, rows in state.pools.tensors.items())


def test_release_only_records():
    state = filled()
    before = snapshot(state)
    state.pages.release(torch.tensor([2, 5]))
    state.slots.assigned([3])
    assert unchanged(state, before)


def test_begin_forward_clears_in_two_launches_and_once():
    state = filled()
    state.pages.release(torch.tensor([2, 5]))
    state.pages.release(torch.tensor([1]))
    state.slots.assigned([3])
    assert state.begin_forward() == 2
    assert empty_owners(state, "c4") == [1, 2, 5]
    assert empty_owners(state, "idx") == [1, 2, 5]
    assert empty_owners(state, "c128") == [3]
    state.pools.tensors["c4"].fill_(7.0)
    assert state.begin_forward() == 0
    assert empty_owners(state, "c4") == []


@pytest.mark.parametrize(
    ("pages", "slots", "launches"), [([1], [], 1), ([], [1], 1), ([], [], 0), ([1], [1], 2)]
)
def test_launches_only_what_is_pending(pages, slots, launches):
    state = filled()
    state.pages.release(torch.tensor(pages, dtype=torch.int64))
    state.slots.assigned(slots)
    assert state.begin_forward() == launches


def test_padded_page_ids_touch_nothing():
    state = filled()
    before = snapshot(state)
    state.pages.release(torch.tensor([-1, -1]))
    state.begin_forward()
    assert unchanged(state, before)


def test_flush_leaves_the_clear_to_the_next_forward_then_empties_every_owner():
    state = filled()
    before = snapshot(state)
    state.reset()
    assert unchanged(state, before)
    assert state.begin_forward() == 2
    assert empty_owners(state, "c4") == [1, 2, 3, 4, 5, 6]
    assert empty_owners(state, "c128") == [1, 2, 3, 4]


def test_resume_empties_undefined_memory_padding_included():
    state = filled()
    for rows in state.pools.tensors.values():
        rows.fill_(torch.nan)
    state.resume()
    assert empty_owners(state, "idx") == list(range(7))
    assert empty_owners(state, "c128") == list(range(5))
    assert state.slots.generation.tolist() == [0, 1, 1, 1, 1]


def test_fence_clears_before_a_copy_may_write():
    state = filled()
    state.pages.release(torch.tensor([4]))
    assert state.pages.fence() is None  # program order is enough on the CPU
    assert empty_owners(state, "c4") == [4]
    state.pools.page_view("c4", 0)[4] = 1
    assert state.begin_forward() == 0


def test_rollback_empties_offsets_from_commit_on():
    state = filled()
    before = snapshot(state)
    for _ in range(2):  # idempotent
        state.rollback.after_verify(
            torch.tensor([3, -1, 1]),
            torch.tensor([134, 20, 0]),
            torch.tensor([3, 1, 2]),
            torch.tensor([6, 6, 2]),
        )
    changed = (state.pools.tensors["c128"] != before["c128"]).any(-1).any(0)
    assert changed.nonzero().flatten().tolist() == [409, 410, 411]  # positions 137..139
    assert torch.equal(state.pools.tensors["c4"], before["c4"])
