"""The ring bounds, exactly at and one beyond their limits."""

from dataclasses import replace

import pytest

from dspark.state import StateGeometry, StateGeometryError, StateLifecycle


def geometry(verify_width=6, c4=16, idx=16, c128=136, page=256):
    sizes = StateGeometry.for_model(
        slots=4, window_pages=6, verify_width=verify_width, c4_layers=2, c128_layers=3
    )
    return replace(
        sizes,
        page=page,
        c4=replace(sizes.c4, ring=c4),
        idx=replace(sizes.idx, ring=idx),
        c128=replace(sizes.c128, ring=c128),
    )


@pytest.mark.parametrize(
    "accepted",
    [
        {"c128": 132},
        {"verify_width": 10},
        {"verify_width": 10, "c128": 256},
        {"page": 128},
        {"verify_width": 1, "c4": 8, "idx": 8, "c128": 128},
        {"verify_width": 11, "c4": 32, "idx": 32, "c128": 137},
    ],
)
def test_sizes_inside_the_bounds_pass(accepted):
    geometry(**accepted).check()


@pytest.mark.parametrize(
    ("refused", "rule"),
    [
        ({"c128": 131}, "verify rows <= ring - window \\+ 2 for c128.*132, got 131"),
        ({"verify_width": 11}, "verify rows <= ring - window \\+ 2 for c4.*17, got 16"),
        (
            {"verify_width": 11, "c4": 32, "idx": 32},
            "verify rows <= ring - window \\+ 2 for c128.*137, got 136",
        ),
        ({"c4": 8, "idx": 8}, "verify rows <= ring - window \\+ 2 for c4"),
        ({"page": 64}, "page must be a multiple of 128"),
        ({"page": 192}, "page must be a multiple of 128"),
        ({"c4": 24, "idx": 24}, "page must be a multiple of the c4 ring"),
        ({"c4": 18, "idx": 18}, "c4 ring must be a multiple of 4"),
        ({"c4": 4, "idx": 4, "verify_width": 1}, "c4 ring must be >= 8"),
        ({"c128": 127, "verify_width": 1}, "c128 ring must be >= 128"),
        ({"c4": 32}, "c4 and idx rings share"),
        ({"verify_width": 0}, "verify_width must be >= 1"),
    ],
)
def test_sizes_beyond_the_bounds_name_the_broken_rule(refused, rule):
    with pytest.raises(StateGeometryError, match=rule):
        geometry(**refused).check()


def test_most_rows_of_a_verify_by_hand():
    """One row commits, so 128 - 2 older positions must survive: 132 rows leave room for 6."""
    assert geometry(c128=132).c128.max_rows() == 6


@pytest.mark.parametrize(("verify_width", "c4", "c128"), [(1, 8, 128), (2, 16, 136), (6, 16, 136)])
def test_model_geometry_doubles_the_c4_ring_under_speculation(verify_width, c4, c128):
    sizes = StateGeometry.for_model(
        slots=8, window_pages=64, verify_width=verify_width, c4_layers=21, c128_layers=20
    )
    sizes.check()
    assert (sizes.c4.ring, sizes.idx.ring, sizes.c128.ring) == (c4, c4, c128)


def test_bytes_of_flash():
    """8 slots and 64 pages of DeepSeek-V4-Flash, by hand."""
    sizes = StateGeometry.for_model(
        slots=8, window_pages=64, verify_width=6, c4_layers=21, c128_layers=20
    )
    assert sizes.nbytes() == {
        "c4": 21 * 65 * 16 * 2048 * 4,
        "idx": 21 * 65 * 16 * 512 * 4,
        "c128": 20 * 9 * 136 * 1024 * 4,
    }


def test_page_sizes():
    """64 is refused, 128 works with C4 rings of 16, 256 is the default."""
    with pytest.raises(StateGeometryError, match="multiple of 128 tokens"):
        geometry(page=64).check()
    geometry(page=128).check()
    assert geometry().page == 256


def test_lifecycle_refuses_sizes_that_corrupt_state():
    with pytest.raises(StateGeometryError):
        StateLifecycle(geometry(c128=131), "cpu")
