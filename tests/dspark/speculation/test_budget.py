"""Verify budgets, and the rows they give each request."""

import itertools

import pytest
import torch

from dspark.kernels.schedule.reference import survival
from dspark.speculation.budget import Mode, VerifyScheduler, best_budget


def scheduler(mode=Mode.SCHEDULED, depth=5, rate=None):
    return VerifyScheduler(mode, gamma=5, depth=depth, slots=9, rate=rate, device="cpu")


def confidence(requests, seed=0):
    return torch.rand(requests, 5, generator=torch.Generator().manual_seed(seed))


def slots(requests):
    return torch.arange(1, requests + 1)


@pytest.mark.parametrize("seed", range(20))
def test_budget_is_the_best_of_all_budgets(seed):
    """Against trying every K."""
    generator = torch.Generator().manual_seed(seed)
    requests = seed % 4 + 1
    chance = survival(torch.rand(requests, 5, generator=generator))
    seconds = torch.rand(40, generator=generator, dtype=torch.float64).sort().values + 0.05
    rate = 1 / seconds
    ranked = sorted(chance.double().flatten().tolist(), reverse=True)
    speed = [
        (requests + sum(ranked[:k])) * float(rate[requests + k]) for k in range(requests * 5 + 1)
    ]
    chosen = int(best_budget(chance, rate))
    assert speed[chosen] == pytest.approx(max(speed), rel=1e-12)


def test_free_rows_are_all_verified_and_dear_ones_are_not():
    chance = torch.full((2, 5), 0.5)
    assert int(best_budget(chance, torch.ones(20, dtype=torch.float64))) == 10
    dear = 1 / torch.arange(1, 21, dtype=torch.float64)
    assert int(best_budget(chance * 0.1, dear)) == 0


def test_budget_ignores_the_confidences_of_the_drafts_it_decides_about():
    """Non-anticipation: this step's confidences share out the budget, they do not set it."""
    rate = torch.cat([torch.ones(4), torch.full((8,), 0.6), torch.full((8,), 0.1)]).double()
    totals = set()
    for seed in range(5):
        made = scheduler(rate=rate)
        made.rows(torch.full((2, 5), 0.8), slots(2))  # remembered for the next step
        totals.add(int(made.rows(confidence(2, seed).clamp(min=0.3), slots(2)).acceptable.sum()))
    assert len(totals) == 1


def test_a_new_owner_of_a_slot_starts_with_full_trust():
    made = scheduler(rate=torch.ones(64).double())
    made.rows(torch.zeros(2, 5), slots(2))
    made.admit(torch.tensor([2]))
    assert made.remembered[1].tolist() == [0.0] * 5
    assert made.remembered[2].tolist() == [1.0] * 5


def test_nothing_known_about_costs_means_everything_is_verified():
    for mode in Mode:
        rows = scheduler(mode).rows(confidence(3), slots(3))
        assert rows.run.tolist() == rows.acceptable.tolist() == [6, 6, 6]


@pytest.mark.parametrize("budget", [0, 1, 4, 14, 15, 99])
@pytest.mark.parametrize("depth", [1, 3, 5])
def test_a_fixed_budget_is_spent_on_the_likeliest_drafts(budget, depth):
    made = scheduler(depth=depth)
    made.forced_rows = budget
    trust = confidence(3, seed=budget).clamp(min=0.05)
    rows = made.rows(trust, slots(3))
    ranked = sorted(
        itertools.product(range(depth), range(3)),
        key=lambda at: (-float(survival(trust)[at[1], at[0]]), *at),
    )
    expected = [1, 1, 1]
    for _, request in ranked[:budget]:
        expected[request] += 1
    assert rows.run.tolist() == rows.acceptable.tolist() == expected


def test_cap_accept_runs_every_row_and_accepts_what_the_budget_admits():
    made = scheduler(Mode.CAP_ACCEPT)
    made.forced_rows = 2
    rows = made.rows(confidence(2), slots(2))
    assert rows.run.tolist() == [6, 6]
    assert int(rows.acceptable.sum()) == 2 + 2


def test_static_mode_takes_no_budget():
    made = scheduler(Mode.STATIC)
    made.forced_rows = 0
    assert made.rows(confidence(2), slots(2)).run.tolist() == [6, 6]
