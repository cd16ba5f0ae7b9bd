"""The schedule against a sort written out in Python."""

import itertools
import random

import pytest
import torch

from dspark.kernels.schedule import schedule


def oracle(confidence, budget, eps, min_len, max_len, real):
    """Sort (survival desc, position asc, request asc), take `budget` of the live ones."""
    candidates = []
    for r, row in enumerate(confidence.tolist()[:real]):
        survival = torch.tensor(1.0)
        for i, c in enumerate(row[: max_len - min_len]):
            c = 0.0 if c != c else min(max(c, 0.0), 1.0)
            survival = survival * torch.tensor(c)
            if survival >= torch.tensor(eps):
                candidates.append((-survival.item(), i, r))
    length = [min_len if r < real else 0 for r in range(len(confidence))]
    for _, _, r in sorted(candidates)[: max(budget, 0)]:
        length[r] += 1
    return length


def random_case(generator: random.Random):
    requests, gamma = generator.randint(1, 8), generator.randint(1, 7)
    palette = generator.choice(
        [[0.0, 0.5, 1.0], [0.9, 0.99, 1.0], [0.25, 0.5], None, None, [1e-3, 1.0, float("nan")]]
    )
    confidence = torch.tensor(
        [
            [generator.random() if palette is None else generator.choice(palette)] * 1
            for _ in range(requests * gamma)
        ]
    ).view(requests, gamma)
    budget = generator.choice([-1, 0, 1, 2, requests, requests * gamma - 1, requests * gamma, 99])
    min_len = generator.randint(1, 2)
    max_len = generator.randint(min_len, gamma + 1)
    real = generator.choice([requests, requests, generator.randint(0, requests)])
    return confidence, budget, generator.choice([1e-6, 0.3]), min_len, max_len, real


def check(case):
    confidence, budget, eps, min_len, max_len, real = case
    got = schedule(
        confidence,
        torch.tensor([budget], dtype=torch.int32, device=confidence.device),
        eps=eps,
        min_len=min_len,
        max_len=max_len,
        num_real=torch.tensor([real], dtype=torch.int32, device=confidence.device),
    )
    assert got.dtype == torch.int32
    assert got.tolist() == oracle(confidence, budget, eps, min_len, max_len, real), case


def test_four_hundred_random_batches():
    generator = random.Random(20260811)
    for _ in range(400):
        check(random_case(generator))


def test_every_budget_of_one_batch():
    confidence = torch.tensor([[0.9, 0.9, 0.1], [0.9, 0.9, 0.9], [0.5, 1.0, 1.0]])
    for budget in range(-1, 12):
        check((confidence, budget, 1e-6, 1, 4, 3))


def test_by_hand():
    """Survivals 0.9 0.81 | 0.8 0.8 | 0.9 0.45: two 0.9 in request order, then 0.81, then 0.8."""
    confidence = torch.tensor([[0.9, 0.9], [0.8, 1.0], [0.9, 0.5]])
    lengths = [
        schedule(confidence, torch.tensor([b], dtype=torch.int32)).tolist() for b in range(7)
    ]
    assert lengths == [
        [1, 1, 1],
        [2, 1, 1],
        [2, 1, 2],
        [3, 1, 2],
        [3, 2, 2],
        [3, 3, 2],
        [3, 3, 3],
    ]


def test_ties_go_to_the_earlier_position_then_the_earlier_request():
    confidence = torch.ones(3, 2)
    lengths = [
        schedule(confidence, torch.tensor([b], dtype=torch.int32)).tolist() for b in range(5)
    ]
    assert lengths == [[1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2], [3, 2, 2]]


def test_a_broken_row_takes_no_budget_and_leaves_others_alone():
    good = torch.tensor([[0.9, 0.8], [0.7, 0.6]])
    broken = torch.cat([good, torch.full((1, 2), torch.nan)])
    budget = torch.tensor([3], dtype=torch.int32)
    assert schedule(broken, budget).tolist() == [*schedule(good, budget).tolist(), 1]


def test_earlier_requests_first_and_empty_batch():
    got = schedule(torch.ones(2, 5), torch.tensor([3], dtype=torch.int32))
    assert got.tolist() == [3, 2]
    assert schedule(torch.ones(0, 5), torch.tensor([3], dtype=torch.int32)).shape == (0,)


@pytest.mark.parametrize(
    ("confidence", "bounds"),
    [
        (torch.ones(2, 5), {"min_len": 0}),
        (torch.ones(2, 5), {"max_len": 7}),
        (torch.ones(2, 5), {"min_len": 4, "max_len": 3}),
        (torch.ones(5), {}),
        (torch.ones(2, 5).double(), {}),
    ],
)
def test_bad_arguments_are_refused(confidence, bounds):
    with pytest.raises(ValueError, match=r"confidence|min_len"):
        schedule(confidence, torch.tensor([1], dtype=torch.int32), **bounds)


def test_length_never_shrinks_with_the_budget():
    generator = torch.Generator().manual_seed(5)
    confidence = torch.rand(6, 5, generator=generator)
    lengths = [schedule(confidence, torch.tensor([b], dtype=torch.int32)) for b in range(31)]
    for small, large in itertools.pairwise(lengths):
        assert (large >= small).all()
        assert (large - small).sum() <= 1
