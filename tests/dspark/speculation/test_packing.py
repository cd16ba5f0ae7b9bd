"""Packed verify rows: where each stands, and that nothing is lost on the way."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.speculation.packing import packing_of


def test_places_by_hand():
    packing = packing_of(torch.tensor([2, 1, 3], dtype=torch.int32), 3)
    assert packing.place.tolist() == [0, 1, 3, 6, 7, 8]
    assert packing.at.tolist() == [[0, 1, 1], [2, 2, 2], [3, 4, 5]]
    packed = packing.pack(torch.arange(9) * 10)
    assert packed.tolist() == [0, 10, 30, 60, 70, 80]
    assert packing.spread(packed, -1).tolist() == [0, 10, -1, 30, -1, -1, 60, 70, 80]


def test_nothing_is_packed_where_every_row_runs():
    assert packing_of(torch.tensor([4, 4]), 4) is None


@given(st.data(), st.integers(2, 7))
def test_every_row_that_runs_is_packed_once_and_found_again(data, width):
    run = data.draw(st.lists(st.integers(1, width), min_size=1))
    packing = packing_of(torch.tensor(run, dtype=torch.int32), width)
    if packing is None:
        assert run == [width] * len(run)
        return
    rows = torch.arange(len(run) * width).view(len(run), width)
    packed = packing.pack(rows.flatten())
    assert packed.tolist() == [r * width + j for r, n in enumerate(run) for j in range(n)]
    for r, n in enumerate(run):
        found = packed[packing.at[r]].tolist()
        assert found[:n] == rows[r, :n].tolist()
        assert set(found[n:]) <= {int(rows[r, n - 1])}  # never another request's
    spread = packing.spread(packed, -1).view(rows.shape)
    for r, n in enumerate(run):
        assert spread[r, :n].equal(rows[r, :n])
        assert (spread[r, n:] == -1).all()


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_rows_keep_their_shape(shape):
    packing = packing_of(torch.tensor([1, 2]), 2)
    rows = torch.randn(4, *shape)
    assert packing.spread(packing.pack(rows), 0.0)[packing.place].equal(rows[packing.place])
