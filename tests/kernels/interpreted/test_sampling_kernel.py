"""Sampling kernels against the reference, bit for bit: several chunks, slabs and kinds of rows."""

import pytest
import torch
import triton
import triton.language as tl

from dspark.kernels.common import elementary, rng
from dspark.kernels.common.argmax import NOTHING, token_of
from dspark.kernels.common.elementary_kernel import log, weight
from dspark.kernels.common.rng_kernel import TOKEN, gumbel, stream
from dspark.kernels.sampling import choose, cut_tails, kernel, reference

VOCAB = 100


@pytest.fixture(autouse=True)
def small_launches(monkeypatch):
    """Two chunks of 64 tokens in blocks of 32, the last one partial; slabs of five rows."""
    monkeypatch.setattr(kernel, "CHUNK", 64)
    monkeypatch.setattr(kernel, "SLAB", 5)
    for op in kernel.LAUNCH:
        config = kernel.LAUNCH[op]
        monkeypatch.setitem(kernel.LAUNCH, op, config._replace(constexprs={"BLOCK": 32}))


def rows(requests: int, each: int, seed: int = 0) -> torch.Tensor:
    """Logits f32 [R * V, N] with equal values, NaN, infinities, and a row without a token."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(requests * each, VOCAB, generator=generator) * 4
    logits = (logits * 4).round() / 4  # many equals
    logits[0, 3:9] = torch.nan
    logits[1, 20:] = -torch.inf
    logits[2] = -torch.inf
    logits[3, 40:43] = torch.inf
    logits[4, 5], logits[4, 6] = 0.0, -0.0
    return logits


def settings(requests: int, **changes) -> dict[str, torch.Tensor]:
    """top_k, top_p and min_p of every request, differing from one to the next."""
    pattern = {
        "temperature": [0.0, 1.0, 0.6, 1.5],
        "top_k": [1 << 30, 5, 30, 1],
        "top_p": [1.0, 0.9, 0.35, 0.999],
        "min_p": [0.0, 0.0, 0.05, 0.3],
    } | changes
    types = {"top_k": torch.int32}
    return {
        name: torch.tensor((values * requests)[:requests], dtype=types.get(name, torch.float32))
        for name, values in pattern.items()
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_k": [1 << 30], "temperature": [1.0], "min_p": [0.0], "top_p": [0.9, 0.5, 0.1, 1.0]},
        {"top_p": [1.0], "min_p": [0.0], "temperature": [0.8], "top_k": [1, 2, 7, 99]},
        {"top_p": [1.0], "top_k": [1 << 30], "temperature": [1.3], "min_p": [0.0, 0.1, 1.0, 1e-9]},
    ],
    ids=["mixed", "top_p", "top_k", "min_p"],
)
def test_cut_tails(changes):
    logits, wish = rows(4, 2), settings(4, **changes)
    want = reference.cut_tails(logits, **wish)
    got = cut_tails(logits, **wish)
    assert torch.equal(got.value, want.value)
    assert torch.equal(got.last, want.last)


@pytest.mark.parametrize("cut", [False, True])
def test_choose(cut):
    logits, wish = rows(4, 3), settings(4)
    temperature = wish["temperature"]
    tails = reference.cut_tails(logits, **wish) if cut else None
    seed, position = torch.tensor([5, -1, 2**62, 0]), torch.tensor([0, 7, 2**31, 100])
    want = reference.choose(logits, temperature, seed, position, tails)
    assert torch.equal(choose(logits, temperature, seed, position, tails), want)
    assert want[2] == NOTHING
    assert token_of(want).unique().numel() > 4


@triton.jit
def _elementary(x, y, ln, w, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(ln + i, log(tl.load(x + i)))
    tl.store(w + i, weight(tl.load(y + i)))


def test_elementary_functions():
    n = 4096
    generator = torch.Generator().manual_seed(1)
    x = torch.exp2(torch.rand(n, generator=generator) * 40 - 35)
    y = -torch.rand(n, generator=generator) * 45
    y[:3] = torch.tensor([0.0, torch.nan, -torch.inf])
    ln, w = torch.empty(n), torch.empty(n, dtype=torch.int64)
    _elementary[(1,)](x, y, ln, w, N=n)
    assert torch.equal(ln, elementary.log(x))
    assert torch.equal(w, elementary.weight(y))


@triton.jit
def _noise(out, N: tl.constexpr):
    i = tl.arange(0, N)
    seed = tl.full([1], 77, tl.int64)
    a, b = stream(seed, seed * 0 + 12, TOKEN)
    tl.store(out + i, gumbel(a, b, i))


def test_gumbel():
    n = 4096
    out = torch.empty(n)
    _noise[(1,)](out, N=n)
    of = rng.stream(torch.tensor([77]), torch.tensor([12]), rng.TOKEN)
    assert torch.equal(out, rng.gumbel(of, torch.arange(n)))
