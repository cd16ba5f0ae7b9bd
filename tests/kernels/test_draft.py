"""The Markov chain of drafts and their confidence."""

import pytest
import torch

from dspark.kernels.common.argmax import NOTHING, pack, pack_argmax, token_of
from dspark.kernels.draft import DraftSampling, confidence, markov_block
from dspark.kernels.linear import prepare_bf16
from dspark.kernels.sampling import choose

VOCAB, RANK, GAMMA = 40, 8, 5


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    w1 = torch.randn(VOCAB, RANK, generator=generator).bfloat16()
    w2 = torch.randn(VOCAB, RANK, generator=generator).bfloat16()
    return w1, w2


def base_logits(requests, seed=1):
    return torch.randn(requests, GAMMA, VOCAB, generator=torch.Generator().manual_seed(seed))


def test_greedy_block_follows_the_recurrence():
    w1, w2 = weights()
    base, prev = base_logits(3), torch.tensor([4, 0, 39])
    got = markov_block(base, prev, w1, prepare_bf16(w2))
    for r in range(3):
        token = prev[r].item()
        for k in range(GAMMA):
            logits = base[r, k].double() + w2.double() @ w1[token].double()
            torch.testing.assert_close(got.logits[r, k].double(), logits, rtol=1e-6, atol=1e-6)
            token = logits.argmax().item()
            assert got.tokens[r, k] == token


@pytest.mark.parametrize("depth", range(1, 8))
def test_slot_k_peaks_where_it_should(depth):
    """Base logits of slot k peak at token 10 + k; the Markov table forbids 11 after 10, so slot 1
    takes its runner-up 30. A shift by one in hidden state or previous token breaks this."""
    base = torch.zeros(1, depth, VOCAB)
    for k in range(depth):
        base[0, k, 10 + k] = 5.0
    if depth > 1:
        base[0, 1, 30] = 4.0
    w1, w2 = torch.zeros(VOCAB, 1), torch.zeros(VOCAB, 1)
    w1[10], w2[11] = 1.0, -100.0
    got = markov_block(base, torch.tensor([0]), w1, prepare_bf16(w2))
    want = [10 + k for k in range(depth)]
    if depth > 1:
        want[1] = 30
    assert got.tokens.tolist() == [want]


def sampling(requests):
    return DraftSampling(
        temperature=torch.linspace(0.5, 2.0, requests),
        seeded=torch.arange(requests) % 2 == 0,
        seed=torch.arange(requests) * 7919 + 3,
        committed=torch.arange(requests) + 100,
    )


def test_greedy_rows_of_a_mixed_batch_use_argmax():
    w1, w2 = weights()
    base, prev = base_logits(4), torch.tensor([1, 2, 3, 4])
    greedy = torch.tensor([True, False, True, False])
    w2 = prepare_bf16(w2)
    plain = markov_block(base, prev, w1, w2)
    keys = sampling(4)
    keys.temperature[greedy] = 0.0
    mixed = markov_block(base, prev, w1, w2, sampling=keys)
    assert torch.equal(mixed.tokens[greedy], plain.tokens[greedy])
    assert torch.equal(mixed.logits[greedy], plain.logits[greedy])
    assert not torch.equal(mixed.tokens[~greedy], plain.tokens[~greedy])


def test_a_seeded_row_guesses_what_the_target_will_choose():
    """A draft that knows the target's logits proposes its very tokens; others do not."""
    w1, w2 = torch.zeros(VOCAB, 8), torch.zeros(VOCAB, 8)
    base, keys = base_logits(4), sampling(4)
    got = markov_block(base, torch.tensor([1, 2, 3, 4]), w1, prepare_bf16(w2), sampling=keys)
    target = choose(base.flatten(0, 1), keys.temperature, keys.seed, keys.committed + 1)
    right = (got.tokens == token_of(target).view(4, GAMMA)).sum(1)
    assert right[keys.seeded].tolist() == [GAMMA, GAMMA]
    assert (right[~keys.seeded] < GAMMA).all()


def test_logits_are_kept_on_demand():
    w1, w2 = weights()
    base, prev, w2 = base_logits(2), torch.tensor([1, 2]), prepare_bf16(w2)
    kept = markov_block(base, prev, w1, w2, sampling=sampling(2))
    bare = markov_block(base, prev, w1, w2, keep_logits=False, sampling=sampling(2))
    assert bare.logits is None
    assert torch.equal(bare.tokens, kept.tokens)


def test_a_request_draws_the_same_alone_and_in_any_order():
    w1, w2 = weights()
    base, prev, w2 = base_logits(4), torch.tensor([1, 2, 3, 4]), prepare_bf16(w2)
    keys = sampling(4)
    whole = markov_block(base, prev, w1, w2, sampling=keys)
    for order in ([2], [3, 0], [1, 3, 2, 0]):
        part = markov_block(
            base[order], prev[order], w1, w2, sampling=DraftSampling(*(v[order] for v in keys))
        )
        assert torch.equal(part.tokens, whole.tokens[order])
        assert torch.equal(part.logits, whole.logits[order])


def test_shards_agree_with_the_whole_vocabulary(monkeypatch):
    """Two vocabulary shards, reduced as tp_argmax does, propose what one rank proposes."""
    from dspark.kernels.draft import reference

    w1, w2 = weights()
    base, prev, keys = base_logits(4), torch.tensor([1, 2, 3, 4]), sampling(4)
    whole = markov_block(base, prev, w1, prepare_bf16(w2), sampling=keys)
    half = VOCAB // 2
    other = iter(whole.tokens.T)

    def with_the_other_shard(packed, group):
        # Both shards must see the token that won; check the loser never exceeds it.
        winner = next(other)
        mine = token_of(packed) == winner
        assert (mine == (winner < half)).all()
        return torch.where(mine, packed, pack(torch.full(packed.shape, 1e9), winner))

    monkeypatch.setattr(reference, "tp_argmax", with_the_other_shard)
    part = markov_block(base[..., :half], prev, w1, prepare_bf16(w2[:half]), sampling=keys)
    assert torch.equal(part.tokens, whole.tokens)
    torch.testing.assert_close(part.logits, whole.logits[..., :half], rtol=0, atol=0)


@pytest.mark.parametrize("broken", [torch.nan, -torch.inf])
def test_a_row_of_nan_proposes_token_0_and_leaves_others_alone(broken):
    w1, w2 = weights()
    base, prev, w2 = base_logits(3), torch.tensor([1, 2, 3]), prepare_bf16(w2)
    keys = sampling(3)
    clean = markov_block(base, prev, w1, w2, sampling=keys)
    base[1] = broken
    got = markov_block(base, prev, w1, w2, sampling=keys)
    assert got.tokens[1].tolist() == [0] * GAMMA
    assert torch.equal(got.tokens[[0, 2]], clean.tokens[[0, 2]])


def test_an_infinite_logit_wins():
    w1, w2 = weights()
    base = base_logits(1)
    base[0, 2, 17] = torch.inf
    assert markov_block(base, torch.tensor([0]), w1, prepare_bf16(w2)).tokens[0, 2] == 17


def test_confidence_is_the_calibrated_sigmoid():
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, GAMMA, 16, generator=generator).bfloat16()
    w1, _ = weights()
    proj = torch.randn(16 + RANK, generator=generator)
    prev_tokens = torch.tensor([[1, 2, 3, 4, 5], [0, 0, 39, 7, 7]])
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.0, 4.0])
    hidden[1, 3] = torch.nan
    got = confidence(hidden, prev_tokens, w1, proj, temperature)
    for r in range(2):
        for k in range(GAMMA):
            features = torch.cat([hidden[r, k], w1[prev_tokens[r, k]]]).double()
            z = features @ proj.double()
            if r == 1 and k == 3:
                assert got.probability[r, k] == 0
                continue
            torch.testing.assert_close(got.logit[r, k].double(), z, rtol=1e-6, atol=1e-6)
            want = torch.sigmoid(z / temperature[k])
            torch.testing.assert_close(got.probability[r, k].double(), want, rtol=1e-5, atol=1e-7)


def test_packed_pairs_order_by_value_then_smaller_id():
    values = torch.tensor([-torch.inf, -3e38, -1.0, -0.0, 0.0, 1e-45, 2.0, torch.inf])
    packed = pack(values, torch.zeros(8).long())
    assert packed[0] == NOTHING
    assert packed[3] == packed[4]
    assert (packed.diff() >= 0).all()
    assert (pack(torch.ones(3), torch.tensor([0, 5, 129279])).diff() < 0).all()
    assert token_of(pack(torch.tensor([-1.0]), torch.tensor([129279]))).item() == 129279
    assert pack(torch.tensor([torch.nan]), torch.tensor([3])).item() == NOTHING
    assert token_of(torch.tensor([NOTHING])).item() == 0


def test_pack_argmax_takes_the_first_of_equals():
    rows = torch.tensor([[1.0, 3.0, 3.0], [torch.nan, 2.0, torch.nan], [torch.nan] * 3])
    packed = pack_argmax(rows, vocab_start=100)
    assert token_of(packed).tolist() == [101, 101, 0]
    assert (packed == NOTHING).tolist() == [False, False, True]
