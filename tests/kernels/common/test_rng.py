"""Counter-based random numbers: distribution, independence, and nothing but the key matters."""

import torch

from dspark.kernels.common import rng


def test_uniform_is_flat_in_every_argument(goodness):
    i = torch.arange(1 << 16)
    flat = torch.full((64,), 1 / 64)
    zero = torch.zeros(1, dtype=torch.int64)
    varied = {
        "seed": rng.uniform(rng.stream(i, zero, rng.ACCEPT)),
        "high half of the seed": rng.uniform(rng.stream(i << 32, zero, rng.ACCEPT)),
        "position": rng.uniform(rng.stream(zero, i, rng.ACCEPT)),
        "purpose": rng.uniform(rng.stream(zero, zero, i)),
        "token": rng.uniform(rng.stream(zero, zero, rng.ACCEPT), i),
    }
    for name, u in varied.items():
        assert (u >= 0).all(), name
        assert (u < 1).all(), name
        assert goodness((u * 64).long(), flat)[0] > 1e-3, name
        # Neighbouring keys give unrelated numbers.
        pairs = (u[:-1] * 8).long() * 8 + (u[1:] * 8).long()
        assert goodness(pairs, flat)[0] > 1e-3, name


def test_exponential_has_the_right_law_and_no_extremes(goodness):
    tokens = torch.arange(1 << 17)
    zero = torch.zeros(1, dtype=torch.int64)
    e = rng.exponential(rng.stream(zero, zero, rng.DRAFT), tokens)
    assert (e > 0).all()
    assert e.isfinite().all()
    assert goodness(((1 - torch.exp(-e)) * 64).long(), torch.full((64,), 1 / 64))[0] > 1e-3
    # The small end decides races between many tokens: -log(1 - u) there, to fp32.
    u = (rng.bits(rng.stream(zero, zero, rng.DRAFT), tokens).double() + 0.5) * 2.0**-32
    small = u < 0.5
    torch.testing.assert_close(e.double()[small], -torch.log1p(-u)[small], rtol=2e-6, atol=0)


def test_the_batch_does_not_matter():
    seed = torch.tensor([7, -1, 2**62 + 5, 0])
    position = torch.tensor([0, 5, 2**31, 9])
    whole = rng.uniform(rng.stream(seed, position, rng.RESAMPLE))
    for i in (3, 1, 0, 2):
        assert whole[i] == rng.uniform(rng.stream(seed[i], position[i], rng.RESAMPLE))


def test_known_bits():
    """Pinned: a change of the hash changes every seeded completion ever served."""
    of = rng.stream(torch.tensor([0, 20260811]), torch.tensor([0, 41]), rng.ACCEPT)
    assert rng.bits(of).tolist() == [677239479, 2419131260]
