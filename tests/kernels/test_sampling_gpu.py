"""Sampling on a CUDA device: the reference's bits over a whole vocabulary, whatever the batch."""

import pytest
import torch

from dspark.kernels.sampling import choose, cut_tails, reference

pytestmark = pytest.mark.gpu

VOCAB, V = 129_280, 6


@pytest.fixture
def problem(device):
    """20 requests of 6 rows, more than one slab; logits with equal values, as bf16 heads give."""
    generator = torch.Generator().manual_seed(0)
    r = torch.arange(20)
    logits = (torch.randn(20 * V, VOCAB, generator=generator) * 3).bfloat16().float()
    logits[7, 100:] = -torch.inf
    logits[8] = torch.nan
    wish = {
        "temperature": r * 0.1,  # request 0 is greedy
        "top_k": torch.where(r % 3 == 0, 1 << 30, 40).to(torch.int32),
        "top_p": torch.where(r % 2 == 0, 0.9, 1.0),
        "min_p": torch.where(r % 5 == 0, 0.05, 0.0),
    }
    return logits, wish, r * 977 - 5, r * 100


def test_the_references_bits(problem, device):
    logits, wish, seed, position = problem
    want = reference.cut_tails(logits, **wish)
    got = cut_tails(logits.to(device), **{k: v.to(device) for k, v in wish.items()})
    assert torch.equal(got.value.cpu(), want.value)
    assert torch.equal(got.last.cpu(), want.last)
    tokens = reference.choose(logits, wish["temperature"], seed, position, want)
    mine = choose(
        logits.to(device), wish["temperature"].to(device), seed.to(device), position.to(device), got
    )
    assert torch.equal(mine.cpu(), tokens)


def test_a_request_alone_and_fifty_times(problem, device):
    logits, wish, seed, position = (
        {k: v.to(device) for k, v in x.items()} if isinstance(x, dict) else x.to(device)
        for x in problem
    )
    whole = cut_tails(logits, **wish)
    tokens = choose(logits, wish["temperature"], seed, position, whole)
    one = slice(13, 14)
    rows = slice(13 * V, 14 * V)
    for _ in range(50):
        cut = cut_tails(logits[rows], **{k: v[one] for k, v in wish.items()})
        assert torch.equal(cut.value, whole.value[rows])
        assert torch.equal(cut.last, whole.last[rows])
        alone = choose(logits[rows], wish["temperature"][one], seed[one], position[one], cut)
        assert torch.equal(alone, tokens[rows])
