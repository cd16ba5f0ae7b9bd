"""Verify budgets, and the rows they give each request."""

import itertools

import pytest
import torch

from dspark.kernels.schedule.reference import survival
from dspark.speculation.budget import Mode, VerifyScheduler, best_budget
from dspark.speculation.step_cost import Steps

FREE = (Steps(1, (1, 6), (1.0, 1.0)),)


def scheduler(mode=Mode.SCHEDULED, depth=5, cost=None):
    return VerifyScheduler(mode, gamma=5, depth=depth, slots=9, cost=cost, device="cpu")


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
    budgets = requests * 5 + 1
    seconds = torch.rand(budgets, generator=generator, dtype=torch.float64).sort().values + 0.05
    ranked = sorted(chance.double().flatten().tolist(), reverse=True)
    speed = [(requests + sum(ranked[:k])) / float(seconds[k]) for k in range(budgets)]
    chosen = int(best_budget(chance, seconds))
    assert speed[chosen] == pytest.approx(max(speed), rel=1e-12)


def test_free_rows_are_all_verified_and_dear_ones_are_not():
    chance = torch.full((2, 5), 0.5)
    assert int(best_budget(chance, torch.ones(11, dtype=torch.float64))) == 10
    dear = torch.arange(2, 13, dtype=torch.float64)
    assert int(best_budget(chance * 0.1, dear)) == 0


def test_budget_ignores_the_confidences_of_the_drafts_it_decides_about():
    """Non-anticipation: this step's confidences share out the budget, they do not set it."""
    cost = (Steps(2, (2, 5, 6, 9, 10, 12), (1.0, 1.0, 1.6, 1.6, 9.0, 9.0)),)
    totals = set()
    for seed in range(5):
        made = scheduler(cost=cost)
        made.rows(torch.full((2, 5), 0.8), slots(2))  # remembered for the next step
        totals.add(int(made.rows(confidence(2, seed).clamp(min=0.3), slots(2)).acceptable.sum()))
    assert len(totals) == 1


def test_a_new_owner_of_a_slot_starts_with_full_trust():
    made = scheduler(cost=FREE)
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


def test_the_same_confidences_buy_different_rows_in_batches_of_different_sizes():
    """One request: a row costs half a step. Four: a hundredth of a second buys 0.064 tokens, the
    third drafts' chance, but not 0.0256, when 6.5 tokens take 2.1 seconds."""
    cost = (
        Steps(1, (1, 6), (1.0, 3.5)),
        Steps(4, (4, 24), (2.0, 2.2)),
    )
    totals = []
    for requests in (1, 4):
        made = scheduler(cost=cost)
        made.rows(torch.full((requests, 5), 0.4), slots(requests))
        rows = made.rows(torch.full((requests, 5), 0.4), slots(requests))
        totals.append(int(rows.run.sum()))
    assert totals == [1, 4 * (1 + 3)]


def test_static_mode_takes_no_budget():
    made = scheduler(Mode.STATIC)
    made.forced_rows = 0
    assert made.rows(confidence(2), slots(2)).run.tolist() == [6, 6]
