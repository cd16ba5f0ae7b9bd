"""Emptied rows against hand-computed rows."""

import pytest
import torch

from dspark.kernels.state import c128_rollback, clear_pages, clear_slots, empty_rows

RING = 256


def filled(layers=3, rows=5 * RING, width=8):
    """Every row distinct, with NaN sprinkled in: emptying must not multiply old content."""
    pool = torch.arange(layers * rows * width, dtype=torch.float32).reshape(layers, rows, width)
    pool[:, rows * 7 // 10] = torch.nan
    return pool


def emptied_rows(before, after):
    """Rows that became empty; every other row must be unchanged. The same in every layer."""
    half = before.shape[2] // 2
    empty = (after[..., :half] == 0).all(-1) & (after[..., half:] == -torch.inf).all(-1)
    assert (empty == empty[0]).all()
    untouched = ~empty[0]
    assert torch.equal(
        before[:, untouched].view(torch.int32), after[:, untouched].view(torch.int32)
    )
    return empty[0].nonzero().flatten().tolist()


def rollback(pool, slot, committed, commit, verify, ring=RING):
    c128_rollback(
        pool,
        torch.tensor(slot),
        torch.tensor(committed),
        torch.tensor(commit, dtype=torch.int32),
        torch.tensor(verify, dtype=torch.int32),
        ring=ring,
        verify_width=6,
    )


@pytest.mark.parametrize("commit", [1, 2, 3, 4, 5, 6])
def test_rollback_at_126_empties_the_rejected_rows(commit):
    before = filled()
    after = before.clone()
    rollback(after, [3], [126], [commit], [6])
    assert emptied_rows(before, after) == list(range(894 + commit, 900))


def test_rollback_wraps_round_the_ring():
    before = filled()
    after = before.clone()
    rollback(after, [3], [254], [2], [6])
    assert emptied_rows(before, after) == [768, 769, 770, 771]


def test_rollback_skips_padding_and_respects_ragged_verify():
    before = filled()
    after = before.clone()
    rollback(after, [2, -1, 1], [10, 10, 300], [1, 1, 3], [3, 6, 3])
    assert emptied_rows(before, after) == [2 * RING + 11, 2 * RING + 12]


def test_rollback_twice_equals_once():
    once = filled()
    rollback(once, [3, 0], [126, 254], [2, 1], [6, 6])
    twice = once.clone()
    rollback(twice, [3, 0], [126, 254], [2, 1], [6, 6])
    assert torch.equal(once.nan_to_num(7.0), twice.nan_to_num(7.0))


def test_clear_slots_and_pages():
    before = filled()
    after = before.clone()
    clear_slots(after, torch.tensor([3, -1, 1], dtype=torch.int32), ring=RING)
    assert emptied_rows(before, after) == [*range(RING, 2 * RING), *range(3 * RING, 4 * RING)]

    attention, indexer = filled(rows=6 * 16, width=16), filled(layers=2, rows=6 * 16, width=4)
    before_attention, before_indexer = attention.clone(), indexer.clone()
    clear_pages([attention, indexer], torch.tensor([4, -1, 4]), ring=16)
    assert emptied_rows(before_attention, attention) == list(range(64, 80))
    assert emptied_rows(before_indexer, indexer) == list(range(64, 80))


def test_empty_lists_are_legal():
    pool = filled()
    before = pool.clone()
    none = torch.empty(0, dtype=torch.int64)
    clear_slots(pool, none, ring=RING)
    clear_pages([pool, pool], none - 1, ring=RING)
    c128_rollback(pool, none, none, none, none, ring=RING, verify_width=6)
    assert emptied_rows(before, pool) == []


def test_a_new_pool_is_empty():
    pool = empty_rows(2, 16, 6, "cpu")
    assert (pool[..., :3] == 0).all()
    assert (pool[..., 3:] == -torch.inf).all()


def test_bad_pools_are_refused():
    with pytest.raises(ValueError, match="state pool"):
        clear_slots(torch.zeros(2, 10, 4), torch.tensor([0]), ring=16)
    with pytest.raises(ValueError, match="verify_width"):
        c128_rollback(filled(), *[torch.tensor([1])] * 4, ring=RING, verify_width=RING + 1)
