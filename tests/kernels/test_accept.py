"""Greedy acceptance by hand, and rejection sampling against exact probabilities."""

import pytest
import torch

from dspark.kernels.accept import accept_chosen, accept_greedy, accept_sampled
from dspark.kernels.accept.reference import race
from dspark.kernels.common import rng
from dspark.kernels.common.argmax import token_of
from dspark.kernels.sampling import choose

V = 4  # candidates a request in the greedy tests: gamma 3


def logits_with_argmax(tokens: list[list[int]], vocab=16) -> torch.Tensor:
    logits = torch.zeros(len(tokens) * V, vocab)
    for row, token in enumerate(t for request in tokens for t in request):
        logits[row, token] = 1.0
    return logits


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_greedy_by_hand():
    candidates = torch.tensor(
        [[9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3], [9, 5, 5, 5]]
    )
    choices = [[1, 2, 3, 4], [1, 2, 7, 8], [6, 2, 3, 4], [1, 2, 3, 4], [5, 5, 5, 5]]
    got = accept_greedy(
        candidates,
        logits_with_argmax(choices),
        acceptable=lengths(4, 4, 4, 2, 0),
        committed=torch.tensor([10, 20, 30, 40, 50]),
        rows_run=lengths(4, 4, 4, 4, 0),
    )
    assert got.accepted.tolist() == [3, 2, 0, 1, 0]
    assert got.bonus.tolist() == [4, 7, 6, 2, 5]
    assert got.commit_len.tolist() == [4, 3, 1, 2, 0]
    assert got.new_len.tolist() == [14, 23, 31, 42, 50]
    assert got.trimmed.tolist() == [0, 0, 0, 2, 0]
    assert got.tokens[:4].tolist() == [[1, 2, 3, 4], [1, 2, 7, 0], [6, 0, 0, 0], [1, 2, 0, 0]]


def test_rows_that_did_not_run_are_not_read():
    candidates = torch.tensor([[9, 1, 2, 3]])
    logits = logits_with_argmax([[1, 2, 3, 4]])
    logits[2:] = torch.nan
    got = accept_greedy(candidates, logits, acceptable=lengths(2), committed=torch.tensor([0]))
    assert (got.accepted.item(), got.bonus.item(), got.trimmed.item()) == (1, 2, 0)


def sampled(candidates, logits, draft_logits, **changes):
    requests = candidates.shape[0]
    arguments = {
        "acceptable": torch.full((requests,), candidates.shape[1], dtype=torch.int32),
        "committed": torch.zeros(requests, dtype=torch.int64),
        "temperature": torch.ones(requests),
        "seed": torch.arange(requests),
    }
    return accept_sampled(candidates, logits, draft_logits, **{**arguments, **changes})


@pytest.mark.parametrize("broken", [torch.nan, -torch.inf])
def test_a_broken_target_row_accepts_nothing(broken):
    candidates = torch.tensor([[9, 1, 2, 3], [9, 0, 0, 0], [9, 1, 2, 3]])
    logits = logits_with_argmax([[1, 2, 3, 4]] * 3)
    clean_greedy = accept_greedy(
        candidates, logits, acceptable=lengths(4, 4, 4), committed=torch.zeros(3).long()
    )
    clean_sampled = sampled(candidates, logits, None)
    logits[V : 2 * V] = broken
    greedy = accept_greedy(
        candidates, logits, acceptable=lengths(4, 4, 4), committed=torch.zeros(3).long()
    )
    for got, clean in ((greedy, clean_greedy), (sampled(candidates, logits, None), clean_sampled)):
        assert (got.accepted[1].item(), got.bonus[1].item()) == (0, 0)
        for now, before in zip(got, clean, strict=True):
            assert torch.equal(now[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("broken", [torch.nan, -torch.inf, torch.inf])
def test_broken_draft_logits_still_sample_the_target(broken, goodness):
    n = 20_000
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    logits = p.log().expand(n * 2, 4).contiguous()
    draft_logits = torch.full((n, 1, 4), broken)
    candidates = torch.zeros(n, 2, dtype=torch.int64)
    if broken == torch.inf:  # q is uniform over the infinities
        candidates[:, 1] = torch.arange(n) % 4
    got = sampled(candidates, logits, draft_logits)
    first = got.tokens[:, 0]
    assert ((first >= 0) & (first < 4)).all()
    assert goodness(first, p)[0] > 1e-3


def test_an_infinite_target_logit_is_certain():
    logits = torch.zeros(8 * 2, 4)
    logits[:, 3] = torch.inf
    got = sampled(torch.tensor([[0, 1]] * 8), logits, torch.zeros(8, 1, 4))
    assert (got.tokens[:, 0] == 3).all()


def test_a_choice_judges_as_the_argmax_does():
    generator = torch.Generator().manual_seed(0)
    candidates = torch.randint(0, 4, (64, V), generator=generator)
    logits = torch.randn(64 * V, 4, generator=generator)
    logits[9] = torch.nan
    common = {
        "acceptable": torch.arange(64).to(torch.int32) % (V + 1),
        "committed": torch.arange(64),
        "rows_run": torch.full((64,), V, dtype=torch.int32),
    }
    seed = torch.zeros(64).long()
    choice = choose(logits, torch.zeros(64), seed, seed)
    want = accept_greedy(candidates, logits, **common)
    got = accept_chosen(candidates, choice, **common)
    for name, a, b in zip(want._fields, want, got, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("right", range(V))
def test_drafts_change_how_many_tokens_are_emitted_not_which(right):
    """Emitted tokens are always the target's choices, from the first on."""
    generator = torch.Generator().manual_seed(right)
    logits = torch.randn(3 * V, 50, generator=generator)
    seed, prefix = torch.tensor([5, -9, 2**40]), torch.tensor([7, 8, 9])
    choice = choose(logits, torch.tensor([0.7, 1.0, 1.3]), seed, prefix + 1)
    truth = token_of(choice).view(3, V)
    drafts = torch.where(torch.arange(V - 1) < right, truth[:, :-1], (truth[:, :-1] + 1) % 50)
    candidates = torch.cat([torch.zeros(3, 1, dtype=torch.int64), drafts], 1)
    got = accept_chosen(candidates, choice, acceptable=lengths(V, V, V), committed=prefix)
    count = min(right, V - 1) + 1
    assert got.commit_len.tolist() == [count] * 3
    assert torch.equal(got.tokens[:, :count], truth[:, :count])


def test_a_request_draws_the_same_alone():
    generator = torch.Generator().manual_seed(1)
    candidates = torch.randint(0, 8, (6, V), generator=generator)
    logits = torch.randn(6, V, 8, generator=generator)
    draft_logits = torch.randn(6, V - 1, 8, generator=generator)
    whole = sampled(candidates, logits.flatten(0, 1), draft_logits)
    for r in range(6):
        alone = sampled(
            candidates[r : r + 1],
            logits[r],
            draft_logits[r : r + 1],
            seed=torch.tensor([r]),
        )
        for name, a, b in zip(whole._fields, whole, alone, strict=True):
            assert torch.equal(a[r : r + 1], b), name


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="logits"):
        accept_greedy(
            torch.zeros(2, 3).long(),
            torch.zeros(5, 4),
            acceptable=lengths(3, 3),
            committed=torch.zeros(2).long(),
        )
    with pytest.raises(ValueError, match="choices"):
        accept_chosen(
            torch.zeros(2, 3).long(),
            torch.zeros(5).long(),
            acceptable=lengths(3, 3),
            committed=torch.zeros(2).long(),
        )
    with pytest.raises(ValueError, match="draft_logits"):
        sampled(torch.zeros(2, 3).long(), torch.zeros(6, 4), torch.zeros(2, 3, 4))


# --- the output law -----------------------------------------------------------------------------

DRAWS, VOCAB = 100_000, 16


def top_k(logits, k=5):
    kept = logits.topk(k, -1).values[..., -1:]
    return logits.masked_fill(logits < kept, -torch.inf)


def top_p(logits, mass=0.8):
    p, order = logits.softmax(-1).sort(-1, descending=True)
    outside = (p.cumsum(-1) - p) >= mass
    return logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)


def min_p(logits, ratio=0.05):
    p = logits.softmax(-1)
    return logits.masked_fill(p < ratio * p.amax(-1, keepdim=True), -torch.inf)


# name -> (temperature, filter applied to logits / temperature)
SETTINGS = {
    "plain": (1.0, lambda x: x),
    "cool": (0.6, lambda x: x),
    "top_k": (1.3, top_k),
    "top_p": (1.0, top_p),
    "min_p": (0.9, min_p),
}


def draft_tokens(kind: str, logits: torch.Tensor, temperature: float, stream: rng.Stream):
    """(tokens, logits of the proposal law or None when the proposal is deterministic)."""
    if kind == "argmax":
        return logits.argmax(-1), None
    if kind == "adversarial":  # always the target's least likely token, claimed as a certainty
        return logits.argmin(-1), None
    return race((logits / temperature).softmax(-1), stream), logits


@pytest.mark.parametrize("kind", ["argmax", "sampled", "adversarial"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_output_law_is_the_target(kind, setting, goodness):
    """Two tokens of DRAWS independent requests: the first, and the second given the first."""
    temperature, keep = SETTINGS[setting]
    generator = torch.Generator().manual_seed(11)
    first = torch.randn(VOCAB, generator=generator) * 1.5
    second = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5  # row: given the first token
    draft_first = first + torch.randn(VOCAB, generator=generator)
    draft_second = second + torch.randn(VOCAB, VOCAB, generator=generator)
    # The target's logits as the worker hands them over: masked, not yet divided by temperature.
    target_first, target_second = (keep(x / temperature) * temperature for x in (first, second))

    seed = torch.arange(DRAWS) * 2_654_435_761 + 99
    temperatures = torch.full((DRAWS,), temperature)
    zero = torch.zeros(DRAWS, dtype=torch.int64)

    def step(known_first: torch.Tensor | None):
        """A verify step with one draft; position 1 holds the first token, 2 the second."""
        position = 1 if known_first is None else 2
        stream = rng.stream(seed, zero + position, rng.DRAFT)
        if known_first is None:
            source, p_rows = draft_first.expand(DRAWS, -1), target_first.expand(DRAWS, -1)
        else:
            source, p_rows = draft_second[known_first], target_second[known_first]
        draft, q = draft_tokens(kind, source, temperature, stream)
        after = target_second[draft] if known_first is None else torch.zeros(DRAWS, VOCAB)
        return accept_sampled(
            torch.stack([zero, draft], 1),
            torch.stack([p_rows, after], 1).flatten(0, 1),
            None if q is None else q[:, None],
            acceptable=torch.full((DRAWS,), 2, dtype=torch.int32),
            committed=zero + position - 1,
            temperature=temperatures,
            seed=seed,
        )

    one = step(None)
    token_1 = one.tokens[:, 0]
    # Requests that accepted their draft already hold a second token; the rest take a step more.
    token_2 = torch.where(one.accepted == 1, one.tokens[:, 1], step(token_1).tokens[:, 0])

    p_first = (target_first / temperature).softmax(-1)
    p_second = (target_second / temperature).softmax(-1)
    tail, distance = goodness(token_1, p_first)
    assert tail > 1e-3
    assert distance < 0.01
    joint = (p_first[:, None] * p_second).flatten()
    pair = token_1 * VOCAB + token_2
    common = joint * DRAWS >= 5  # chi-square needs a few counts a cell; pool the rest
    pooled = torch.where(common[pair], pair, VOCAB * VOCAB)
    tail, _ = goodness(
        pooled, torch.cat([torch.where(common, joint, 0.0), joint[~common].sum()[None]])
    )
    assert tail > 1e-3
    assert (joint[pair] > 0).all()
    if kind != "adversarial":
        assert 0.2 < one.accepted.float().mean() < 1.0


def test_acceptance_rate_is_the_overlap():
    """P(accept) = sum_y min(p, q): the sampler wastes no draft."""
    generator = torch.Generator().manual_seed(4)
    p_logits, q_logits = torch.randn(2, VOCAB, generator=generator)
    seed = torch.arange(DRAWS)
    zero = torch.zeros(DRAWS, dtype=torch.int64)
    draft = race(q_logits.softmax(-1).expand(DRAWS, -1), rng.stream(seed, zero + 1, rng.DRAFT))
    got = sampled(
        torch.stack([zero, draft], 1),
        p_logits.expand(2 * DRAWS, -1),
        q_logits.expand(DRAWS, 1, -1),
    )
    overlap = torch.minimum(p_logits.softmax(-1), q_logits.softmax(-1)).sum()
    assert abs(got.accepted.double().mean() - overlap) < 0.005


def test_a_capped_run_draws_from_the_target(goodness):
    """acceptable 1: nothing is tested, the token comes from p whatever the draft was."""
    p = torch.tensor([0.5, 0.25, 0.125, 0.125])
    n = 20_000
    got = sampled(
        torch.ones(n, 3, dtype=torch.int64),
        p.log().expand(3 * n, 4),
        torch.zeros(n, 2, 4),
        acceptable=torch.ones(n, dtype=torch.int32),
    )
    assert (got.accepted == 0).all()
    assert goodness(got.bonus, p)[0] > 1e-3
