"""Compressor kernels under the interpreter against the references."""

import pytest
import torch
from kv_cases import assert_pool_close, compress_case, run_compressor

from dspark.kernels import compress
from dspark.kernels.compress import reference

CASES = [
    (4, 512, [(0, 6)]),  # the first window has no predecessor
    (4, 512, [(13, 6), (250, 6)]),
    (4, 128, [(2, 6), (7, 1)]),
    (4, 128, [(16, 1), (30, 2)]),  # one of them closes nothing
    (128, 512, [(124, 6)]),
    (128, 512, [(127, 1), (383, 2)]),
    (128, 512, [(0, 128)]),
]


@pytest.mark.parametrize(("ratio", "width", "requests"), CASES)
def test_entries_and_ring_match_the_reference(ratio, width, requests):
    case = compress_case(ratio, width, requests, padded=2)
    device = torch.device("cpu")
    got = run_compressor(compress, case.to(device))
    want = run_compressor(reference, case.to(device))
    assert torch.equal(got.state, want.state)
    assert_pool_close(got.pool, want.pool, None if width == 128 else 256 // ratio)


@pytest.mark.parametrize(("ratio", "width", "start"), [(4, 512, 10), (4, 128, 10), (128, 512, 124)])
def test_verify_rows_equal_single_rows(ratio, width, start):
    """Six rows in one launch, or one launch each: the same entries and ring, bit for bit."""
    whole = compress_case(ratio, width, [(start, 6)])
    alone = whole.to(torch.device("cpu"))
    run_compressor(compress, whole)
    for t in range(6):
        one = slice(t, t + 1)
        plan = alone.plan[one].clone()
        plan[:, 3] = 0
        step = alone._replace(
            s=alone.s[one], plan=plan, store=alone.store[one], entry=alone.entry[one]
        )
        run_compressor(compress, step)
    assert torch.equal(alone.pool, whole.pool)
    assert torch.equal(alone.state, whole.state)


def test_all_empty_window_gives_zero():
    case = compress_case(4, 512, [(0, 4)])
    case.s[:, 1024:] = -torch.inf
    run_compressor(compress, case)
    slot = case.pool[1]
    assert (slot[:576] == 0).all()


@pytest.mark.parametrize("requests", [[(13, 6), (250, 6)], [(2, 1)], [(0, 9)]])
def test_one_launch_equals_three(requests):
    """Ring 16: nine rows of a request are the most that may share a launch."""
    streams = {}
    for running in (True, False):
        main, index = compress_case(4, 512, requests, padded=1), compress_case(4, 128, requests, 1)
        parts = [main.stream, index.stream]
        compress.c4_compress_pair(*parts, *main.addresses, running=running)
        streams[running] = parts
    for one, three in zip(streams[True], streams[False], strict=True):
        assert torch.equal(one.state, three.state)
        assert torch.equal(one.pool, three.pool)
