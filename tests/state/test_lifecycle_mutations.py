"""Deliberate mutations: the properties must notice each of them, or they prove nothing.

Every mutation is one way in which a real server went wrong. `blind` names properties that are
switched off, to show that the corruption itself is seen and not only the broken rule.
"""

import random
from typing import NamedTuple

import pytest
from simulation import faults
from simulation.checks import Violation
from simulation.driver import operate
from simulation.server import Server, prompt


class Mutation(NamedTuple):
    fault: type[faults.Faults]
    seen_by: set[str]
    overlap: bool = False
    blind: frozenset[str] = frozenset()

    def __str__(self):
        blind = f"_without_{'_'.join(sorted(self.blind))}" if self.blind else ""
        return f"{self.fault.__name__}{blind}"


RULES = frozenset(
    {"empty_at_first_use", "rollback_locality", "order", "frontier"}
)  # rules whose breach corrupts nothing yet

MUTATIONS = [
    Mutation(faults.UpstreamStoreRule, {"frontier"}),
    Mutation(faults.UpstreamStoreRule, {"spec_equivalence"}, blind=RULES),
    Mutation(faults.NoPageTail, {"frontier"}),
    Mutation(faults.NoPageTail, {"spec_equivalence", "published_pages"}, blind=RULES),
    Mutation(faults.NoPageTail, {"spec_equivalence"}, blind=RULES | {"published_pages"}),
    Mutation(faults.StoreOnlyAccepted, {"spec_equivalence"}, blind=RULES),
    Mutation(faults.OffByOneRing, {"spec_equivalence"}),
    Mutation(faults.OptimisticLength, {"draft_consistency"}),
    Mutation(faults.PaddingIntoZero, {"padding"}),
    Mutation(faults.RollbackByDrafts, {"rollback_locality"}),
    Mutation(faults.RollbackByDrafts, {"spec_equivalence"}, blind=RULES),
    Mutation(faults.RollbackLate, {"spec_equivalence"}, blind=RULES),
    Mutation(
        faults.EarlyClears,
        {"spec_equivalence", "draft_consistency", "empty_at_first_use", "order"},
        overlap=True,
    ),
    Mutation(
        faults.EarlyClears, {"spec_equivalence", "draft_consistency"}, overlap=True, blind=RULES
    ),
    Mutation(faults.SlotClearLate, {"spec_equivalence", "order"}),
    Mutation(faults.UnhookedRelease, {"empty_at_first_use", "order", "check()"}),
    Mutation(faults.UnhookedRelease, {"empty_at_first_use", "order"}, overlap=True),
    Mutation(faults.ForgetFlush, {"empty_at_first_use", "order"}, overlap=True),
    Mutation(faults.ForgetFlush, {"check()"}),
    Mutation(faults.KeepGeneration, {"generation_monotonic"}),
    Mutation(faults.RestartGenerations, {"generation_monotonic"}),
    Mutation(faults.LoadUnordered, {"order"}, overlap=True),
    Mutation(
        faults.LoadUnordered, {"spec_equivalence", "published_pages"}, overlap=True, blind=RULES
    ),
    Mutation(faults.LoadBeforeFlush, {"order"}),
    Mutation(faults.LoadBeforeFlush, {"spec_equivalence", "published_pages"}, blind=RULES),
    Mutation(faults.LoadWithoutRows, {"published_pages"}),
    Mutation(faults.LoadWithoutRows, {"spec_equivalence"}, blind=RULES | {"published_pages"}),
    Mutation(faults.LeakOnFailedLoad, {"all_or_nothing_load"}),
    Mutation(faults.PublishAllocated, {"published_pages"}),
    Mutation(faults.EagerWindow, {"window"}),
    Mutation(faults.WrongPage, {"no_leak_no_double", "frontier"}),
]


def first_violation(server_of, seeds=25, events=120) -> str | None:
    for seed in range(seeds):
        try:
            operate(server_of(), random.Random(seed), events)
        except Violation as violation:
            return violation.prop
    return None


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_mutation_is_caught(mutation):
    found = first_violation(
        lambda: Server(
            overlap=mutation.overlap, padding=2, faults=mutation.fault(), ignored=mutation.blind
        )
    )
    assert found in mutation.seen_by


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_the_same_runs_pass_without_a_mutation(overlap):
    assert first_violation(lambda: Server(overlap=overlap, padding=2), seeds=3) is None


def test_early_clears_are_harmless_without_overlap():
    early = faults.EarlyClears
    assert first_violation(lambda: Server(faults=early()), seeds=3) is None


def run_upstream_rule(gamma: int) -> Violation | None:
    """50 steps of one request under the 0.5.17 store rule, judged by its tokens alone."""
    server = Server(
        verify_width=gamma + 1, faults=faults.UpstreamStoreRule(), ignored=frozenset({"frontier"})
    )
    rng = random.Random(0)
    server.admit(prompt(0, 126))
    server.chunk(126)
    try:
        for _ in range(50):
            server.verify([rng.randint(1, gamma + 1)], [gamma + 1])
    except Violation as violation:
        return violation
    return None


def test_upstream_store_rule_is_seen_at_gamma_5_and_right_at_gamma_3():
    violation = run_upstream_rule(5)
    assert violation is not None
    assert violation.prop == "spec_equivalence"
    assert run_upstream_rule(3) is None
