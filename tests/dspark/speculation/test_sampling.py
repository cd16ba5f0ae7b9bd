"""From raw logits to the distribution a request asked for, and the numbers it is sampled by."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from dspark.errors import UsageError
from dspark.kernels.accept.reference import softmax
from dspark.speculation.forced_drafts import ForcedDrafts, right_drafts
from dspark.speculation.sampling import RequestParams, cut_tails, draw, request_seed

VOCAB = 16


def params(temperature=1.0, top_k=TOP_K_ALL, top_p=1.0, min_p=0.0, requests=1, greedy=False):
    def column(value, dtype=torch.float32):
        return torch.full((requests,), value, dtype=dtype)

    return RequestParams(
        column(temperature),
        column(greedy, torch.bool),
        column(top_k, torch.int32),
        column(top_p),
        column(min_p),
        all_greedy=greedy,
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
    kept = cut_tails(logits[:, None], params(requests=40, **setting))[:, 0]
    assert torch.equal(kept.isfinite(), kept_by_sglang(logits, **full))
    assert torch.equal(kept[kept.isfinite()], logits[kept.isfinite()])


def test_ties_at_the_cut_go_to_the_smaller_id():
    logits = torch.zeros(1, 1, VOCAB)
    assert cut_tails(logits, params(top_k=3))[0, 0].isfinite().nonzero().flatten().tolist() == [
        0,
        1,
        2,
    ]


def test_greedy_requests_keep_every_token_beside_sampled_ones():
    mixed = params(top_k=2, requests=2)
    mixed = mixed._replace(greedy=torch.tensor([True, False]))
    kept = cut_tails(torch.randn(2, 3, VOCAB), mixed).isfinite().sum(-1)
    assert kept[0].tolist() == [VOCAB] * 3
    assert kept[1].tolist() == [2] * 3


def test_something_always_stays():
    kept = cut_tails(torch.randn(5, 1, VOCAB), params(top_p=0.0, min_p=1.0, top_k=0, requests=5))
    assert (kept.isfinite().sum(-1) == 1).all()


def test_first_tokens_follow_the_distribution():
    draws = 50_000
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5
    setting = params(temperature=0.8, top_k=9, requests=draws)
    kept = cut_tails(logits.expand(draws, 1, -1), setting)[:, 0]
    seed = torch.arange(draws)
    tokens = draw(kept, setting, seed, torch.full((draws,), 12))
    expected = softmax(kept[0], torch.tensor(0.8))
    observed = torch.bincount(tokens, minlength=VOCAB) / draws
    assert 0.5 * (observed - expected).abs().sum() < 0.01


def test_a_broken_row_draws_token_0_and_leaves_its_neighbour_alone():
    logits = torch.randn(2, VOCAB)
    alone = draw(logits[1:], params(requests=1), torch.tensor([9]), torch.tensor([4]))
    logits[0] = torch.nan
    both = draw(logits, params(requests=2), torch.tensor([8, 9]), torch.tensor([3, 4]))
    assert both.tolist() == [0, alone.item()]


def test_seeds_are_the_requests_own_or_follow_from_its_id():
    assert request_seed(1, "a", 7) == 7
    assert request_seed(1, "a", None) == request_seed(1, "a", None)
    assert len({request_seed(s, r, None) for s in (1, 2) for r in ("a", "b")}) == 4
    assert -(2**63) <= request_seed(1, "a", None) < 2**63


# Forced drafts.


def wish(kind, continuation=(), prompt=4):
    custom = None if kind is None else {"draft": kind, "continuation": list(continuation)}
    return SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=custom), origin_input_ids=[0] * prompt
    )


def test_forced_drafts_follow_their_requests():
    forced = ForcedDrafts(slots=6, longest=32, depth=3, vocab=100, device="cpu")
    line = list(range(20, 40))
    kinds = ["oracle", "wrong", "wrong@2", "random", None]
    slot = torch.arange(1, 6)
    forced.admit(slot.tolist(), [wish(kind, line) for kind in kinds])
    model = torch.tensor([[7, 8, 9]] * 5)
    logits = torch.zeros(5, 3, 100)
    # The bonus token, output 5 of the request, sits at position 4 + 5: drafts start at output 6.
    tokens, law = forced.replace(model, logits, slot, torch.full((5,), 9))
    assert tokens[0].tolist() == [26, 27, 28]
    assert tokens[1].tolist() == [27, 28, 29]
    assert tokens[2].tolist() == [26, 27, 29]
    assert tokens[4].tolist() == [7, 8, 9]
    assert law[4].eq(0).all()
    assert softmax(law[0], torch.tensor(1.0))[1, 27] == 1.0


@pytest.mark.parametrize("kind", ["orakel", "oracle@2", "wrong@", "wrong@x"])
def test_unknown_forced_drafts_are_named(kind):
    with pytest.raises(UsageError, match="oracle, wrong, wrong@k or random"):
        right_drafts(kind, 5)
