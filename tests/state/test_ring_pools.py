"""Row addresses, views and emptiness of the ring pools."""

import pytest
import torch

from dspark.state import StateGeometry, StatePools


@pytest.fixture
def pools():
    sizes = StateGeometry.for_model(
        slots=3, window_pages=5, verify_width=6, c4_layers=2, c128_layers=3, head_dim=2, index_dim=1
    )
    return StatePools(sizes, "cpu")


@pytest.mark.parametrize(
    ("kind", "shape"), [("c4", (2, 96, 8)), ("idx", (2, 96, 4)), ("c128", (3, 544, 4))]
)
def test_pools_start_empty_in_every_row(pools, kind, shape):
    rows = pools.tensors[kind]
    assert rows.shape == shape
    assert rows.dtype == torch.float32
    half = shape[2] // 2
    assert (rows[..., :half] == 0).all()
    assert (rows[..., half:] == -torch.inf).all()


def test_layer_is_a_contiguous_view(pools):
    layer = pools.layer("c128", 1)
    assert layer.is_contiguous()
    layer[7] = 5.0
    assert (pools.tensors["c128"][1, 7] == 5).all()
    assert (pools.tensors["c128"][0, 7, :2] == 0).all()


def test_page_view_is_one_block_a_page(pools):
    view = pools.page_view("c4", 1)
    assert view.shape == (6, 16 * 8 * 4)
    assert view.dtype == torch.uint8
    pools.layer("c4", 1)[5 * 16 + 3] = 2.5
    other = StatePools(pools.geometry, "cpu")
    other.page_view("c4", 1)[2] = view[5]
    assert (other.layer("c4", 1)[2 * 16 + 3] == 2.5).all()
    with pytest.raises(KeyError, match="belongs to slots"):
        pools.page_view("c128", 0)


def test_reset_empties_poisoned_memory(pools):
    for rows in pools.tensors.values():
        rows.fill_(torch.nan)
    pools.reset()
    fresh = StatePools(pools.geometry, "cpu")
    for kind, rows in pools.tensors.items():
        assert torch.equal(rows, fresh.tensors[kind])
