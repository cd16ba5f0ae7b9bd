"""Compressors on a GPU at serving shapes, against the references."""

import pytest
import torch
from kv_cases import assert_pool_close, compress_case, run_compressor

from dspark.kernels import compress
from dspark.kernels.common.index_pages import PACKED_STRIDE
from dspark.kernels.common.kv_pages import page_stride
from dspark.kernels.compress import reference

pytestmark = pytest.mark.gpu
KINDS = [(4, 512), (4, 128), (128, 512)]


@pytest.mark.parametrize(("ratio", "width"), KINDS)
@pytest.mark.parametrize(
    "requests",
    [
        [(0, 6)],
        [(3, 1)],
        [(127, 1), (250, 6), (383, 1), (5, 3)],
        [(124 + r, 6) for r in range(8)],
        [(0, 256)],
        [(13, 200), (100, 28)],
    ],
)
def test_entries_and_ring_match_the_reference(device, ratio, width, requests):
    case = compress_case(ratio, width, requests, padded=2)
    got = run_compressor(compress, case.to(device))
    want = run_compressor(reference, case.to(torch.device("cpu")))
    assert torch.equal(got.state.cpu(), want.state)
    assert_pool_close(got.pool, want.pool, None if width == 128 else 256 // ratio)


@pytest.mark.parametrize(("ratio", "width"), KINDS)
def test_verify_rows_equal_single_rows_and_other_batches(device, ratio, width):
    requests = [(122 + r, 6) for r in range(8)]
    whole = compress_case(ratio, width, requests).to(device)
    alone = whole.to(device)
    run_compressor(compress, whole)
    for t in range(48):
        one = slice(t, t + 1)
        plan = alone.plan[one].clone()
        plan[:, 3] = 0
        step = alone._replace(
            s=alone.s[one], plan=plan, store=alone.store[one], entry=alone.entry[one]
        )
        run_compressor(compress, step)
    assert torch.equal(alone.pool, whole.pool)
    assert torch.equal(alone.state, whole.state)


@pytest.mark.parametrize("requests", [[(122 + r, 6) for r in range(8)], [(0, 9)], [(7, 1)]])
def test_one_launch_equals_three(device, requests):
    """Ring 16: nine rows of a request are the most that may share a launch."""
    streams = {}
    for running in (True, False):
        main = compress_case(4, 512, requests, padded=1).to(device)
        index = compress_case(4, 128, requests, padded=1).to(device)
        parts = [main.stream, index.stream]
        compress.c4_compress_pair(*parts, *main.addresses, running=running)
        streams[running] = parts
    for one, three in zip(streams[True], streams[False], strict=True):
        assert torch.equal(one.state, three.state)
        assert torch.equal(one.pool, three.pool)


@pytest.mark.parametrize(("ratio", "width"), KINDS)
def test_memory_beyond_two_to_the_31(device, ratio, width):
    """Entries on the last page of a pool, raw rows at the end of a ring, of > 2^31 elements."""
    case = compress_case(ratio, width, [(124, 6)]).to(device)
    small = run_compressor(compress, case.to(device))
    per_page = 256 // ratio
    stride = PACKED_STRIDE if width == 128 else page_stride(per_page)
    pages, rows = 2**31 // stride + 10, 2**31 // case.s.shape[1] + 256
    pool = torch.full((pages, stride), 255, dtype=torch.uint8, device=device)
    state = torch.zeros(rows, case.s.shape[1], device=device)
    shift = rows - case.state.shape[0]
    state[shift:] = case.state
    plan, store = case.plan.clone(), case.store
    plan[:, 1:3] = torch.where(plan[:, 1:3] >= 0, plan[:, 1:3] + shift, -1)
    if ratio == 128:
        plan[:, 2] = 256
    moved = case._replace(
        pool=pool, state=state, plan=plan,
        store=torch.where(store >= 0, store + shift, -1),
        entry=torch.where(case.entry >= 0, case.entry + (pages - 2) * per_page, -1),
    )  # fmt: skip
    run_compressor(compress, moved)
    assert torch.equal(moved.pool[-2:], small.pool)
    assert torch.equal(moved.state[shift:], small.state)
