"""The glue of a decode step never asks the device for a value.

On a GPU that would make the host wait for the step in flight. Operators that copy a value to the
host, or whose output shape depends on values, are trapped while each part of the step runs.
"""

from types import SimpleNamespace

import pytest
import torch
from no_sync import NoSync

from dspark.host.draft_input import draft_input
from dspark.kernels.accept import accept_greedy, accept_sampled
from dspark.kernels.draft import confidence, markov_block
from dspark.kernels.linear import prepare_bf16
from dspark.speculation.budget import Mode, VerifyScheduler
from dspark.speculation.forced_drafts import ForcedDrafts
from dspark.speculation.penalties import Penalties
from dspark.speculation.ranks import agree_on_accept
from dspark.speculation.sampling import RequestParams, cut_tails
from dspark.target.draft import block_ids

R, GAMMA, ROWS, VOCAB, HIDDEN, RANK = 3, 5, 6, 64, 16, 8


@pytest.fixture
def step():
    generator = torch.Generator().manual_seed(0)
    return SimpleNamespace(
        slot=torch.tensor([1, 3, 2]),
        prefix=torch.tensor([10, 20, 30]),
        bonus=torch.tensor([4, 5, 6]),
        seed=torch.tensor([1, 2, 3]),
        candidates=torch.randint(0, VOCAB, (R, ROWS), generator=generator),
        logits=torch.randn(R * ROWS, VOCAB, generator=generator),
        base=torch.randn(R, GAMMA, VOCAB, generator=generator),
        hidden=torch.randn(R, GAMMA, HIDDEN, generator=generator),
        lengths=torch.full((R,), ROWS, dtype=torch.int32),
        params=RequestParams(
            torch.ones(R),
            torch.tensor([True, False, False]),
            torch.full((R,), 9, dtype=torch.int32),
            torch.full((R,), 0.9),
            torch.zeros(R),
            all_greedy=False,
            any_cut=True,
        ),
    )


def test_the_trap_works():
    with pytest.raises(AssertionError), NoSync():
        torch.tensor([1.0]).sum().item()
    x = torch.arange(3)
    with pytest.raises(AssertionError), NoSync():
        x[x > 1]


def test_drafting(step):
    w1, w2 = torch.randn(VOCAB, RANK), prepare_bf16(torch.randn(VOCAB, RANK))
    with NoSync():
        block_ids(step.bonus, GAMMA, 63)
        for temperature, greedy in ((None, None), (step.params.temperature, step.params.greedy)):
            block = markov_block(
                step.base,
                step.bonus,
                w1,
                w2,
                temperature=temperature,
                greedy=greedy,
                seed=step.seed,
                prefix_len=step.prefix,
            )
        confidence(step.hidden, block.tokens, w1, torch.randn(HIDDEN + RANK), torch.ones(GAMMA))


@pytest.mark.parametrize("mode", Mode)
def test_scheduling(step, mode):
    rate = 1 / torch.arange(1, 40, dtype=torch.float64)
    made = VerifyScheduler(mode, GAMMA, GAMMA, slots=5, rate=rate, device="cpu")
    with NoSync():
        made.rows(torch.rand(R, GAMMA), step.slot)


def test_adjusting_and_accepting(step):
    penalties = Penalties(5, VOCAB, "cpu")
    forced = ForcedDrafts(5, 32, GAMMA, VOCAB, "cpu")
    with NoSync():
        forced.replace(step.candidates[:, 1:], step.base, step.slot, step.prefix)
        penalties.apply(
            step.logits.view(R, ROWS, VOCAB), step.slot, step.candidates[:, 1:], step.prefix
        )
        kept = cut_tails(step.logits.view(R, ROWS, VOCAB), step.params)
        common = {"verify_len": step.lengths, "prefix_len": step.prefix}
        greedy = accept_greedy(step.candidates, step.logits, **common)
        sampled = accept_sampled(
            step.candidates,
            kept.view(step.logits.shape),
            step.base,
            temperature=step.params.temperature,
            greedy=step.params.greedy,
            seed=step.seed,
            **common,
        )
        for accept in (greedy, sampled):
            agree_on_accept(accept, step.prefix, None)
            penalties.commit(step.slot, accept.tokens, accept.commit_len)
            draft_input(accept.bonus, accept.new_len)
