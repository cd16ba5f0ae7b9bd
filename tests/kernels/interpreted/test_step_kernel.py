"""The step kernels against the reference, on every kind of forward."""

import pytest
import torch

from dspark.kernels.step import (
    BatchRows,
    BlockRows,
    Bounds,
    Rings,
    Tables,
    draft_meta,
    reference,
    step_meta,
)

PAGE = 256


def tables(slots=5, pages=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    full = torch.randperm(slots * pages, generator=generator) + 1
    window = torch.randperm(slots * pages, generator=generator) + 1
    token = torch.arange(PAGE)
    token_slot = (full.view(slots, pages, 1) * PAGE + token).view(slots, -1).int()
    window_slot = torch.zeros((slots * pages + 1) * PAGE, dtype=torch.int64)
    window_slot[full[:, None] * PAGE + token] = window[:, None] * PAGE + token
    return Tables(token_slot, window_slot)


def assert_equal(got, want):
    for name, a, b in zip(want._fields, got, want, strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


FORWARDS = {
    "verify": ([3, -1, 1], [126, 40, 254], [6, 6, 2], 18, 6, True),
    "decode": ([3, 0, 1, 2], [511, 0, 131, 3], [1, 1, 1, 0], 5, None, True),
    "prefill": ([4, 2, 1], [0, 251, 0], [9, 12, 0], 24, None, False),
    "long verify wraps a ring": ([1], [0], [20], 20, 20, True),
    "idle": ([], [], [], 2, None, True),
}


@pytest.mark.parametrize("forward", FORWARDS)
def test_step_meta(forward):
    slots, prefix, lengths, rows, width, store_all = FORWARDS[forward]
    per_request = (torch.tensor(values, dtype=torch.int64) for values in (slots, prefix, lengths))
    arguments = {
        "rows": BatchRows(*per_request, rows, width),
        "tables": tables(),
        "bounds": Bounds(128, max_pages=4, max_c128=8, page=PAGE),
        "rings": Rings(8, 136),
        "store_all": store_all,
    }
    assert_equal(step_meta(**arguments), reference.step_meta(**arguments))


def test_packed_rows_beyond_one_block_of_requests():
    lengths = torch.zeros(40, dtype=torch.int64)
    lengths[[3, 31, 32, 39]] = torch.tensor([2, 1, 3, 1])
    arguments = {
        "rows": BatchRows(torch.arange(40) % 5, torch.arange(40), lengths, 8),
        "tables": tables(),
        "bounds": Bounds(16, max_pages=1, max_c128=2, page=PAGE),
        "rings": Rings(16, 256),
        "store_all": True,
    }
    assert_equal(step_meta(**arguments), reference.step_meta(**arguments))


def test_draft_meta():
    arguments = {
        "rows": BlockRows(
            torch.tensor([3, -1, 1, 2]),
            torch.tensor([300, 9, 4, 140]),
            torch.tensor([0, 0, 2, 256]),
            gamma=3,
        ),
        "tables": tables(),
        "window": 128,
    }
    assert_equal(draft_meta(**arguments), reference.draft_meta(**arguments))
