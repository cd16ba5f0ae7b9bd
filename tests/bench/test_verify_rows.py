"""Where a row count costs more than its neighbours promise."""

import pytest

from dspark.bench.verify_rows import ROWS, against_neighbours, cliffs


def test_a_line_has_no_cliff():
    points = against_neighbours({rows: 10.0 + 2 * rows for rows in (1, 6, 8, 48)})
    assert [p.over_line for p in points] == [None, pytest.approx(1), pytest.approx(1), None]
    assert cliffs(points) == []


def test_a_jump_is_found_where_it_begins():
    """84 -> 100 us and 108 -> 148 us promise 124 us at 96; 170 us is 1.37 times that."""
    points = against_neighbours({84: 100.0, 96: 170.0, 108: 148.0})
    assert points[1].over_line == pytest.approx(170 / 124)
    assert cliffs(points) == [96]


def test_rows_ascend_and_reach_the_widest_verify():
    assert list(ROWS) == sorted(set(ROWS))
    assert 48 * 6 in ROWS
