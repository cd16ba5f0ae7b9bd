"""The sampling ops: the law of what they draw, what the tails lose, and that rows are alone."""

import math

import pytest
import torch

from dspark.kernels.common import elementary, rng
from dspark.kernels.common.argmax import NOTHING, token_of
from dspark.kernels.sampling import Cut, choose, cut_tails
from dspark.kernels.sampling.reference import noised

DRAWS, VOCAB = 100_000, 24
ALL = 1 << 30  # SGLang's top_k of a request that wants none


def column(value: float, requests: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((requests,), value, dtype=dtype)


def cut(logits, temperature=1.0, top_k=ALL, top_p=1.0, min_p=0.0) -> Cut:
    """`cut_tails` with the same parameters for every row."""
    n = len(logits)
    return cut_tails(
        logits,
        column(temperature, n),
        column(top_k, n, torch.int32),
        column(top_p, n),
        column(min_p, n),
    )


def kept(logits: torch.Tensor, tails: Cut) -> torch.Tensor:
    """bool [T, N]: the tokens that stay, read as `Cut` says."""
    ids = torch.arange(logits.shape[1])
    value, last = tails.value[:, None], tails.last[:, None]
    return ((logits > value) | ((logits == value) & (ids <= last))) & (logits > -torch.inf)


def kept_by_hand(row: list[float], temperature, top_k, top_p, min_p) -> set[int]:
    """The rule in plain Python, one row, in double precision."""
    top = max(row)
    weight = [math.exp((x - top) / temperature) for x in row]
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    stays: set[int] = set()
    before = 0.0
    for rank, i in enumerate(order):
        near = weight[i] >= min_p * (1 - 1e-7)
        if rank < top_k and before <= top_p * sum(weight) and near:
            stays.add(i)
        before += weight[i]
    return stays


FILTERS = {
    "none": {},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.06},
    "top_k and top_p": {"top_k": 9, "top_p": 0.7},
    "top_p and min_p": {"top_p": 0.95, "min_p": 0.1},
    "all three, cool": {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "hot": {"temperature": 1.8, "top_p": 0.9},
}


@pytest.mark.parametrize("name", FILTERS)
def test_the_law_of_100000_draws(name, goodness):
    """One seed at 100,000 positions, against softmax over what the filters leave."""
    setting = {"temperature": 1.0, "top_k": ALL, "top_p": 1.0, "min_p": 0.0} | FILTERS[name]
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5
    tails = cut(row[None], **setting)
    stays = kept_by_hand(row.double().tolist(), **setting)
    assert set(kept(row[None], tails)[0].nonzero().flatten().tolist()) == stays
    outside = torch.tensor([i not in stays for i in range(VOCAB)])
    exact = (row.double() / setting["temperature"]).masked_fill(outside, -torch.inf).softmax(0)
    tokens = token_of(
        choose(
            row.expand(DRAWS, -1),
            column(setting["temperature"], 1),
            torch.tensor([20260811]),
            torch.tensor([100]),
            Cut(tails.value.expand(DRAWS), tails.last.expand(DRAWS)),
        )
    )
    p_value, distance = goodness(tokens, exact)
    assert p_value > 1e-3
    assert distance < 0.01


def test_seeds_are_as_good_as_positions(goodness):
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(6))
    n = DRAWS
    tokens = token_of(
        choose(row.expand(n, -1), column(1.0, n), torch.arange(n) - n // 2, column(9, n).long())
    )
    assert goodness(tokens, row.double().softmax(0))[0] > 1e-3
    # Neighbouring seeds and neighbouring positions are independent of each other.
    pairs = tokens[:-1] * VOCAB + tokens[1:]
    law = row.double().softmax(0)
    assert goodness(pairs, torch.outer(law, law).flatten())[0] > 1e-3


def test_random_rows_are_cut_by_the_rule():
    generator = torch.Generator().manual_seed(8)
    for trial in range(150):
        logits = torch.randn(1, 40, generator=generator) * (1 + trial % 5)
        if trial % 3 == 0:
            logits = logits.round()  # equals everywhere
        setting = {
            "temperature": [1.0, 0.3, 2.0][trial % 3],
            "top_k": [ALL, 3, 17, 40][trial % 4],
            "top_p": [1.0, 0.9, 0.123, 0.5, 0.99][trial % 5],
            "min_p": [0.0, 0.05, 0.0, 0.5, 0.001, 1.0, 0.0][trial % 7],
        }
        found = set(kept(logits, cut(logits, **setting))[0].nonzero().flatten().tolist())
        assert found == kept_by_hand(logits[0].double().tolist(), **setting), setting


def test_equals_at_the_cut_lose_the_larger_ids():
    logits = torch.zeros(1, VOCAB)
    assert kept(logits, cut(logits, top_k=3))[0].nonzero().flatten().tolist() == [0, 1, 2]
    logits[0, 7] = 5.0
    assert kept(logits, cut(logits, top_k=3))[0].nonzero().flatten().tolist() == [0, 1, 7]
    assert kept(logits, cut(logits, top_p=0.0))[0].nonzero().flatten().tolist() == [7]


def test_a_large_vocabulary_keeps_its_sums_exact():
    """129,280 tokens of one weight: the mass is counted, not rounded."""
    logits = torch.zeros(1, 129_280)
    assert int(kept(logits, cut(logits, top_p=0.25)).sum()) == 129_280 // 4 + 1


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 300, generator=generator) * 3
    r = torch.arange(40)
    temperature, top_p = 0.3 + r * 0.05, 1 - r * 0.02
    top_k, min_p = (r % 7 + 1).to(torch.int32) * 40, (r % 3) * 0.01
    whole = cut_tails(logits, temperature, top_k, top_p, min_p)
    tokens = choose(logits, temperature, r * 17, r, whole)
    for i in (39, 0, 17):
        one = slice(i, i + 1)
        alone = cut_tails(logits[one], temperature[one], top_k[one], top_p[one], min_p[one])
        assert torch.equal(alone.value, whole.value[one])
        assert torch.equal(alone.last, whole.last[one])
        single = choose(logits[one], temperature[one], r[one] * 17, r[one], alone)
        assert torch.equal(single, tokens[one])


def test_rows_of_a_block_are_consecutive_positions():
    logits = torch.randn(3 * 4, 50, generator=torch.Generator().manual_seed(4))
    temperature, seed = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1, 2, 3])
    block = choose(logits, temperature, seed, torch.tensor([10, 20, 30]))
    for r in range(3):
        for j in range(4):
            row = 4 * r + j
            one = choose(
                logits[row : row + 1],
                temperature[r : r + 1],
                seed[r : r + 1],
                torch.tensor([10 * (r + 1) + j]),
            )
            assert one[0] == block[row]
    assert torch.equal(token_of(block[4:8]), logits[4:8].argmax(1))


def test_another_seed_position_or_token_draws_other_noise():
    def noise(seed, position):
        of = rng.stream(torch.tensor([seed]), torch.tensor([position]), rng.TOKEN)
        return rng.gumbel(of, torch.arange(1000))

    base = noise(7, 5)
    assert base.unique().numel() > 990
    for other in (noise(8, 5), noise(7, 6), noise(-7, 5), noise(7 + 2**32, 5)):
        assert (other == base).sum() < 3
    assert torch.equal(base, noise(7, 5))


def test_the_extremes_of_noise_and_temperature_stay_finite():
    of = rng.stream(torch.arange(4000), torch.zeros(1, dtype=torch.int64), rng.TOKEN)
    noise = rng.gumbel(rng.Stream(of.a[:, None], of.b[:, None]), torch.arange(50))
    assert -3 < noise.min() < noise.max() < 23
    assert abs(float(noise.double().mean()) - 0.5772156649) < 0.01
    row = torch.randn(1, 30)
    one = rng.Stream(of.a[:1, None], of.b[:1, None])
    keys = noised(row, torch.tensor([1e30]), one, torch.arange(30))
    assert keys.isfinite().all()


def test_broken_rows_yield_nothing_and_infinities_win():
    logits = torch.randn(3, 20)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2, 11] = torch.inf
    tails = cut(logits, top_k=4, top_p=0.5)
    seed = torch.tensor([1, 2, 3])
    got = choose(logits, column(1.0, 3), seed, seed, tails)
    assert got[:2].tolist() == [NOTHING, NOTHING]
    assert token_of(got[2:]).tolist() == [11]


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="2 requests need logits"):
        choose(torch.zeros(3, 5), torch.ones(2), torch.zeros(2).long(), torch.zeros(2).long())


# --- logarithm and powers of two ------------------------------------------------------------------


def test_elementary_functions_are_near_the_true_ones():
    generator = torch.Generator().manual_seed(0)
    x = torch.exp2(torch.rand(100_000, generator=generator) * 60 - 50)
    true = x.double().log()
    assert ((elementary.log(x) - true).abs() <= 2.0**-22 * true.abs() + 2.0**-30).all()
    y = -torch.rand(100_000, generator=generator) * 42
    held = elementary.weight(y).double() * 2.0**-elementary.UNIT
    assert ((held - y.double().exp2()).abs() <= 2.0**-22 * y.double().exp2() + 2.0**-40).all()


def test_elementary_functions_keep_their_bits():
    """Pinned: a change of a bit changes seeded completions."""
    x = torch.tensor([1.0, 2.0, 0.5, 1e-10, 3.1415927, 16.6])
    assert elementary.log(x).view(torch.int32).tolist() == [
        0,
        1060205080,
        -1087278568,
        -1044892431,
        1066567298,
        1077136705,
    ]
    y = torch.tensor([0.0, -1.0, -0.3, -17.77, -40.0, -41.5, torch.nan, -torch.inf])
    assert elementary.weight(y).tolist() == [
        1 << 40,
        1 << 39,
        893080961024,
        4919225,
        1,
        0,
        0,
        0,
    ]
