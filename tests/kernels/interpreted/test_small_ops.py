"""Random numbers, schedule, state clearing and the ordered sum: kernels against references."""

import random

import pytest
import torch
import triton
import triton.language as tl

from dspark.kernels.collective import ordered_sum
from dspark.kernels.collective import reference as collective_reference
from dspark.kernels.common import rng
from dspark.kernels.common import rng_kernel as rng_kernel
from dspark.kernels.schedule import reference as schedule_reference
from dspark.kernels.schedule import schedule
from dspark.kernels.state import c128_rollback, clear_pages, clear_slots
from dspark.kernels.state import reference as state_reference


@triton.jit
def _draw(seed, position, uniform, exponential, PURPOSE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = rng_kernel.stream(tl.load(seed + i), tl.load(position + i), PURPOSE)
    tl.store(uniform + i, rng_kernel.uniform(a, b))
    tl.store(exponential + i, rng_kernel.exponential(a, b, i))


def test_random_numbers_are_the_references_bit_for_bit():
    n = 256
    generator = torch.Generator().manual_seed(0)
    seed = torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator)
    position = torch.randint(0, 2**31, (n,), generator=generator)
    uniform, exponential = torch.empty(n), torch.empty(n)
    _draw[(1,)](seed, position, uniform, exponential, PURPOSE=rng.DRAFT + 3, N=n)
    of = rng.stream(seed, position, rng.DRAFT + 3)
    assert torch.equal(uniform, rng.uniform(of))
    torch.testing.assert_close(exponential, rng.exponential(of, torch.arange(n)), rtol=1e-6, atol=0)


def schedule_cases():
    generator = random.Random(8)
    palettes = [[0.0, 0.5, 1.0], [0.9, 1.0], [0.25, 0.5, float("nan")], None]
    for case in range(200):
        requests, gamma = generator.randint(1, 6), generator.randint(1, 5)
        palette = palettes[case % 4]
        values = [
            generator.random() if palette is None else generator.choice(palette)
            for _ in range(requests * gamma)
        ]
        min_len = generator.randint(1, 2)
        yield {
            "confidence": torch.tensor(values).view(requests, gamma),
            "budget": generator.choice([-1, 0, 1, 2, 3, requests * gamma - 1, requests * gamma]),
            "min_len": min_len,
            "max_len": generator.randint(min_len, gamma + 1),
            "num_real": generator.choice([None, requests, generator.randint(0, requests)]),
        }


def test_schedule_equals_the_sort_in_two_hundred_cases():
    for case in schedule_cases():
        real = case["num_real"]
        arguments = {
            "confidence": case["confidence"],
            "budget": torch.tensor([case["budget"]], dtype=torch.int32),
            "eps": 1e-6,
            "min_len": case["min_len"],
            "max_len": case["max_len"],
            "num_real": None if real is None else torch.tensor([real], dtype=torch.int32),
        }
        got = schedule(**arguments)
        assert torch.equal(got, schedule_reference.schedule(**arguments)), case


def test_schedule_beyond_one_block_of_requests():
    confidence = torch.rand(40, 3, generator=torch.Generator().manual_seed(2))
    confidence[7:12] = confidence[30:35]  # ties across blocks
    for budget in (1, 37, 119, 120):
        arguments = {"budget": torch.tensor([budget], dtype=torch.int32), "eps": 1e-6}
        bounds = {"min_len": 1, "max_len": 4}
        want = schedule_reference.schedule(confidence, **arguments, **bounds)
        assert torch.equal(schedule(confidence, **arguments, **bounds), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rollback(dtype):
    pool = torch.randn(2, 3 * 136, 8).to(dtype)
    lengths = {
        "request_slot": torch.tensor([1, -1, 2]),
        "committed": torch.tensor([134, 3, 130]),
        "commit_len": torch.tensor([2, 1, 6], dtype=torch.int32),
        "rows_run": torch.tensor([6, 6, 6], dtype=torch.int32),
    }
    want, got = pool.clone(), pool.clone()
    state_reference.c128_rollback(want, **lengths, ring=136, verify_width=6)
    c128_rollback(got, **lengths, ring=136, verify_width=6)
    assert torch.equal(got, want)
    assert not torch.equal(got, pool)


def test_clears():
    attention, indexer = torch.randn(2, 4 * 8, 12), torch.randn(1, 4 * 8, 4)
    pages = torch.tensor([2, -1, 0])
    want = [attention.clone(), indexer.clone()]
    state_reference.clear_blocks(want, pages, ring=8)
    clear_pages([attention, indexer], pages, ring=8)
    assert torch.equal(attention, want[0])
    assert torch.equal(indexer, want[1])
    clear_slots(attention, torch.tensor([3]), ring=8)
    state_reference.clear_blocks(want[:1], torch.tensor([3]), ring=8)
    assert torch.equal(attention, want[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4, 7, 8])
def test_ordered_sum(ranks, dtype):
    gathered = torch.randn(ranks, 3, 500, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert torch.equal(ordered_sum(gathered), collective_reference.ordered_sum(gathered))
