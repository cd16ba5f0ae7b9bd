"""From raw logits to the distribution a request asked for, and the numbers it is sampled by."""

import pytest
import torch
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from dspark.kernels.common.argmax import NOTHING, token_of
from dspark.speculation.sampling import RequestParams, choice_seed, draw, request_seed, tails

VOCAB = 16


def params(temperature=1.0, top_k=TOP_K_ALL, top_p=1.0, min_p=0.0, requests=1):
    def column(value, dtype=torch.float32):
        return torch.full((requests,), value, dtype=dtype)

    return RequestParams(
        column(temperature),
        column(top_k, torch.int32),
        column(top_p),
        column(min_p),
        all_greedy=temperature == 0,
        any_cut=True,
    )


def kept_by_sglang(logits, temperature, top_k, top_p, min_p):
    """The support SGLang's torch sampler draws from (its own masking, its draw replaced)."""
    probability = torch.softmax(logits / temperature, -1)
    values, index = probability.sort(dim=-1, descending=True)
    total = torch.cumsum(values, dim=-1)
    place = torch.arange(logits.shape[-1])
    values = values.clone()
    values[:, place >= top_k] = 0.0
    values[(total - probability.sort(dim=-1, descending=True).values) > top_p] = 0.0
    values[values < values[:, :1] * min_p] = 0.0
    return torch.zeros_like(values).scatter_(1, index, values) > 0


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 0.6, "top_k": 7, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 1.7, "top_k": 2, "top_p": 0.3},
    ],
)
def test_tails_are_cut_as_sglang_cuts_them(setting):
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    full = {"temperature": 1.0, "top_k": TOP_K_ALL, "top_p": 1.0, "min_p": 0.0} | setting
    cut = tails(logits, params(requests=40, **setting))
    kept = logits > cut.value[:, None]
    kept |= (logits == cut.value[:, None]) & (torch.arange(VOCAB) <= cut.last[:, None])
    assert torch.equal(kept, kept_by_sglang(logits, **full))


def test_greedy_batches_and_batches_without_wishes_are_not_cut():
    logits = torch.randn(2, VOCAB)
    assert tails(logits, params(temperature=0, top_k=2, requests=2)) is None
    assert tails(logits, params(requests=2)._replace(any_cut=False)) is None


def test_a_greedy_request_beside_a_sampled_one_takes_the_argmax():
    mixed = params(top_k=3, requests=2)._replace(temperature=torch.tensor([0.0, 1.0]))
    logits = torch.randn(2 * 50, VOCAB, generator=torch.Generator().manual_seed(1))
    tokens = token_of(draw(logits, mixed, torch.tensor([3, 4]), torch.tensor([0, 0])))
    assert torch.equal(tokens[:50], logits[:50].argmax(1))
    assert not torch.equal(tokens[50:], logits[50:].argmax(1))


def test_a_broken_row_has_no_choice_and_leaves_its_neighbour_alone():
    logits = torch.randn(2, VOCAB)
    alone = draw(logits[1:], params(requests=1), torch.tensor([9]), torch.tensor([4]))
    logits[0] = torch.nan
    both = draw(logits, params(requests=2), torch.tensor([8, 9]), torch.tensor([3, 4]))
    assert both.tolist() == [NOTHING, alone.item()]


def test_seeds_are_the_requests_own_or_follow_from_its_id():
    assert request_seed(1, "a", 7) == 7
    assert request_seed(1, "a", None) == request_seed(1, "a", None)
    assert len({request_seed(s, r, None) for s in (1, 2) for r in ("a", "b")}) == 4
    assert -(2**63) <= request_seed(1, "a", None) < 2**63


def test_choices_of_a_request_have_seeds_of_their_own():
    seeds = [choice_seed(7, i) for i in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert seeds == [choice_seed(7, i) for i in range(100)]
    assert choice_seed(-(2**63), 1) != choice_seed(2**63 - 1, 1)
