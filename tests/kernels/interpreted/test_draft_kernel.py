"""The draft kernels against the reference."""

import pytest
import torch

from dspark.kernels.common import rng
from dspark.kernels.common.argmax import NOTHING, pack_argmax
from dspark.kernels.draft import DraftSampling, confidence, kernel, markov_block, reference
from dspark.kernels.linear import prepare_bf16
from dspark.kernels.sampling.reference import noised

GAMMA, VOCAB, RANK = 3, 150, 16  # three vocabulary blocks, the last one partial


def problem(requests=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(requests, GAMMA, VOCAB, generator=generator)
    w1 = torch.randn(VOCAB, RANK, generator=generator).bfloat16()
    w2 = torch.randn(VOCAB, RANK, generator=generator).bfloat16()
    prev = torch.randint(0, VOCAB, (requests,), generator=generator)
    return base, prev, w1, prepare_bf16(w2)


def sampling(requests=3):
    return DraftSampling(
        temperature=torch.linspace(0.5, 1.5, requests),
        seeded=torch.arange(requests) % 2 == 0,
        seed=torch.arange(requests) * 7919 - 3,
        committed=torch.arange(requests) + 100,
    )


@pytest.mark.parametrize("mode", ["greedy", "sampled", "mixed"])
def test_markov_block(mode):
    keys = None if mode == "greedy" else sampling()
    if mode == "mixed":
        keys = keys._replace(temperature=torch.tensor([0.0, 1.0, 0.8]))
    got = markov_block(*problem(), sampling=keys)
    want = reference.markov_block(*problem(), sampling=keys)
    assert torch.equal(got.tokens, want.tokens)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-5, atol=1e-5)


def test_more_requests_than_a_block_holds():
    got = markov_block(*problem(17))
    assert torch.equal(got.tokens, reference.markov_block(*problem(17)).tokens)


@pytest.mark.parametrize("broken", [torch.nan, -torch.inf])
def test_a_broken_row_proposes_token_0(broken):
    base, *rest = problem()
    clean = markov_block(base, *rest)
    base[1] = broken
    got = markov_block(base, *rest)
    assert got.tokens[1].tolist() == [0] * GAMMA
    assert torch.equal(got.tokens[[0, 2]], clean.tokens[[0, 2]])


def test_ties_go_to_the_smaller_id():
    base, prev, w1, w2 = problem()
    flat = base * 0 + 1.0
    got = markov_block(flat, prev, w1 * 0, w2)
    assert (got.tokens == 0).all()


def test_two_ranks_propose_what_one_proposes(monkeypatch):
    """Vocabulary shards 0..79 and 80..149; the other rank's report is computed on the side."""
    base, prev, w1, w2 = problem()
    whole = markov_block(base, prev, w1, w2, sampling=sampling())
    weight = w2.weight

    class TwoRanks:
        def size(self):
            return 2

    step = iter(range(GAMMA))

    def gather(best, *_):
        k = next(step)
        asked = sampling()
        purpose = torch.where(asked.seeded, rng.TOKEN, rng.DRAFT + k)
        of = rng.stream(asked.seed, asked.committed + k + 1, purpose)
        of = rng.Stream(of.a[:, None], of.b[:, None])
        keys = noised(whole.logits[:, k], asked.temperature, of, torch.arange(VOCAB))
        return torch.stack([best, pack_argmax(keys[:, 80:], 80)])

    monkeypatch.setattr(kernel, "gather", gather)
    part = markov_block(
        base[..., :80], prev, w1, prepare_bf16(weight[:80]), sampling=sampling(), group=TwoRanks()
    )
    assert torch.equal(part.tokens, whole.tokens)
    assert (whole.tokens >= 80).any()
    assert (whole.tokens < 80).any()


def test_confidence():
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(2, GAMMA, 40, generator=generator).bfloat16()
    hidden[1, 2] = torch.nan
    _, _, w1, _ = problem()
    arguments = (
        hidden,
        torch.tensor([[1, 2, 3], [0, 0, VOCAB - 1]]),
        w1,
        torch.randn(40 + RANK, generator=generator),
        torch.tensor([1.0, 0.5, 2.0]),
    )
    got, want = confidence(*arguments), reference.confidence(*arguments)
    torch.testing.assert_close(got.probability, want.probability, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.logit, want.logit, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert got.probability[1, 2] == 0


def test_packing_is_the_references():
    values = torch.tensor([torch.nan, -torch.inf, -2.0, -0.0, 0.0, 3.0, torch.inf, 3.0])
    assert (pack_argmax(values[:2, None]) == NOTHING).all()
    base, prev, w1, w2 = problem(1)
    base[0, 0, :8] = values * 100
    assert torch.equal(
        markov_block(base, prev, w1, w2).tokens, reference.markov_block(base, prev, w1, w2).tokens
    )
