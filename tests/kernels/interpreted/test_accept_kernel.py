"""The accept kernels against the reference, over several vocabulary chunks."""

import pytest
import torch

from dspark.kernels.accept import accept_chosen, accept_greedy, accept_sampled, kernel, reference
from dspark.kernels.sampling.reference import choose

VOCAB, V = 100, 4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Two chunks of 64 tokens in blocks of 32, the last one partial."""
    monkeypatch.setattr(kernel, "CHUNK", 64)
    for op in ("row_best", "row_sums", "race"):
        config = kernel.LAUNCH[op]
        monkeypatch.setitem(kernel.LAUNCH, op, config._replace(constexprs={"BLOCK": 32}))


def problem(requests=6, seed=0):
    """Drafts that often agree with the target: candidates are its argmax, some replaced."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(requests, V, VOCAB, generator=generator) * 3
    draft_logits = logits[:, :-1] + torch.randn(requests, V - 1, VOCAB, generator=generator)
    candidates = torch.cat(
        [torch.zeros(requests, 1, dtype=torch.int64), logits[:, :-1].argmax(-1)], 1
    )
    wrong = torch.rand(requests, V - 1, generator=generator) < 0.2
    candidates[:, 1:][wrong] = 7
    return candidates, logits.flatten(0, 1), draft_logits


def lengths(requests=6):
    return {
        "acceptable": torch.tensor([V, V, 2, 1, 0, 3][:requests], dtype=torch.int32),
        "committed": torch.arange(requests) * 10,
    }


def assert_equal(got, want):
    for name, a, b in zip(want._fields, got, want, strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


@pytest.mark.parametrize("cap_only", [False, True])
def test_greedy(cap_only):
    candidates, logits, _ = problem()
    run = torch.full((6,), V, dtype=torch.int32) if cap_only else None
    arguments = {**lengths(), "rows_run": run}
    want = reference.accept_greedy(candidates, logits, **arguments)
    assert_equal(accept_greedy(candidates, logits, **arguments), want)
    assert want.accepted.unique().numel() > 1


def test_chosen():
    candidates, logits, _ = problem()
    logits[5] = torch.nan
    seed = torch.arange(6)
    choice = choose(logits, torch.full((6,), 0.01), seed, seed)
    arguments = {**lengths(), "rows_run": torch.full((6,), V, dtype=torch.int32)}
    want = reference.accept_chosen(candidates, choice, **arguments)
    assert_equal(accept_chosen(candidates, choice, **arguments), want)
    assert want.accepted.unique().numel() > 1


def test_greedy_over_two_vocabulary_shards(monkeypatch):
    candidates, logits, _ = problem()
    other = kernel._row_best(logits[:, 40:], 40)
    monkeypatch.setattr(kernel, "gather", lambda best, *_: torch.stack([best, other]))

    class TwoRanks:
        def size(self):
            return 2

    got = accept_greedy(candidates, logits[:, :40], **lengths(), group=TwoRanks())
    assert_equal(got, reference.accept_greedy(candidates, logits, **lengths()))


@pytest.mark.parametrize("certain", [False, True])
def test_sampled(certain):
    candidates, logits, draft_logits = problem()
    logits[:, ::3] = -torch.inf  # a filter took a third of the vocabulary
    logits[3 * V] = torch.inf  # request 3, row 0: certain of everything
    arguments = {
        **lengths(),
        "temperature": torch.linspace(0.5, 2.0, 6),
        "seed": torch.arange(6) * 31,
        "rows_run": torch.tensor([V, V, V, V, 0, 3], dtype=torch.int32),
    }
    q = None if certain else draft_logits
    want = reference.accept_sampled(candidates, logits, q, **arguments)
    assert_equal(accept_sampled(candidates, logits, q, **arguments), want)


@pytest.mark.parametrize("broken", [torch.nan, -torch.inf])
def test_broken_rows(broken):
    candidates, logits, draft_logits = problem(3)
    candidates[1, 1] = 0
    logits[V : 2 * V] = broken
    draft_logits[2] = broken
    arguments = {
        **lengths(3),
        "temperature": torch.ones(3),
        "seed": torch.arange(3),
    }
    want = reference.accept_sampled(candidates, logits, draft_logits, **arguments)
    got = accept_sampled(candidates, logits, draft_logits, **arguments)
    assert_equal(got, want)
    assert (got.accepted[1].item(), got.bonus[1].item()) == (0, 0)
    greedy = accept_greedy(candidates, logits, **lengths(3))
    assert_equal(greedy, reference.accept_greedy(candidates, logits, **lengths(3)))
    assert (greedy.accepted[1].item(), greedy.bonus[1].item()) == (0, 0)
