"""The step kernels against the reference, on every kind of forward."""

import pytest
import torch

from dspark.kernels.step import draft_meta, reference, step_meta

PAGE = 256


def tables(slots=5, pages=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    full = torch.randperm(slots * pages, generator=generator) + 1
    swa = torch.randperm(slots * pages, generator=generator) + 1
    token = torch.arange(PAGE)
    req_to_token = (full.view(slots, pages, 1) * PAGE + token).view(slots, -1).int()
    full_to_swa = torch.zeros((slots * pages + 1) * PAGE, dtype=torch.int64)
    full_to_swa[full[:, None] * PAGE + token] = swa[:, None] * PAGE + token
    return {"req_to_token": req_to_token, "full_to_swa": full_to_swa}


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
    slots, prefix, lengths, rows, stride, store_all = FORWARDS[forward]
    arguments = {
        "request_slot": torch.tensor(slots, dtype=torch.int64),
        "committed": torch.tensor(prefix, dtype=torch.int64),
        "row_len": torch.tensor(lengths, dtype=torch.int64),
        "rows": rows,
        **tables(),
        "window": 128,
        "ring_c4": 8,
        "ring_c128": 136,
        "max_pages": 4,
        "max_c128": 8,
        "page": PAGE,
        "store_all": store_all,
        "stride": stride,
    }
    assert_equal(step_meta(**arguments), reference.step_meta(**arguments))


def test_packed_rows_beyond_one_block_of_requests():
    lengths = torch.zeros(40, dtype=torch.int64)
    lengths[[3, 31, 32, 39]] = torch.tensor([2, 1, 3, 1])
    arguments = {
        "request_slot": torch.arange(40) % 5,
        "committed": torch.arange(40),
        "row_len": lengths,
        "rows": 8,
        **tables(),
        "window": 16,
        "ring_c4": 16,
        "ring_c128": 256,
        "max_pages": 1,
        "max_c128": 2,
        "page": PAGE,
        "store_all": True,
        "stride": None,
    }
    assert_equal(step_meta(**arguments), reference.step_meta(**arguments))


def test_draft_meta():
    arguments = {
        "request_slot": torch.tensor([3, -1, 1, 2]),
        "committed": torch.tensor([300, 9, 4, 140]),
        "gamma": 3,
        **tables(),
        "window": 128,
        "valid_from": torch.tensor([0, 0, 2, 256]),
    }
    assert_equal(draft_meta(**arguments), reference.draft_meta(**arguments))
