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


RULES = frozenset({"I05", "I08", "I12", "I13"})  # rules whose breach corrupts nothing yet

MUTATIONS = [
    Mutation(faults.UpstreamStoreRule, {"I13"}),
    Mutation(faults.UpstreamStoreRule, {"I01"}, blind=RULES),
    Mutation(faults.NoPageTail, {"I13"}),
    Mutation(faults.NoPageTail, {"I01", "I14"}, blind=RULES),
    Mutation(faults.NoPageTail, {"I01"}, blind=RULES | {"I14"}),
    Mutation(faults.StoreOnlyAccepted, {"I01"}, blind=RULES),
    Mutation(faults.OffByOneRing, {"I01"}),
    Mutation(faults.OptimisticLength, {"I02"}),
    Mutation(faults.PaddingIntoZero, {"I15"}),
    Mutation(faults.RollbackByDrafts, {"I08"}),
    Mutation(faults.RollbackByDrafts, {"I01"}, blind=RULES),
    Mutation(faults.RollbackLate, {"I01"}, blind=RULES),
    Mutation(faults.EarlyClears, {"I01", "I02", "I05", "I12"}, overlap=True),
    Mutation(faults.EarlyClears, {"I01", "I02"}, overlap=True, blind=RULES),
    Mutation(faults.SlotClearLate, {"I01", "I12"}),
    Mutation(faults.UnhookedRelease, {"I05", "I12", "check()"}),
    Mutation(faults.UnhookedRelease, {"I05", "I12"}, overlap=True),
    Mutation(faults.ForgetFlush, {"I05", "I12"}, overlap=True),
    Mutation(faults.ForgetFlush, {"check()"}),
    Mutation(faults.KeepGeneration, {"I10"}),
    Mutation(faults.RestartGenerations, {"I10"}),
    Mutation(faults.LoadUnordered, {"I12"}, overlap=True),
    Mutation(faults.LoadUnordered, {"I01", "I14"}, overlap=True, blind=RULES),
    Mutation(faults.LoadBeforeFlush, {"I12"}),
    Mutation(faults.LoadBeforeFlush, {"I01", "I14"}, blind=RULES),
    Mutation(faults.LoadWithoutRows, {"I14"}),
    Mutation(faults.LoadWithoutRows, {"I01"}, blind=RULES | {"I14"}),
    Mutation(faults.LeakOnFailedLoad, {"I19"}),
    Mutation(faults.PublishAllocated, {"I14"}),
    Mutation(faults.EagerWindow, {"I16"}),
    Mutation(faults.WrongPage, {"I09", "I13"}),
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
    """50 steps of one request under the 0.5.17 store rule, judged by I1 alone."""
    server = Server(
        verify_rows=gamma + 1, faults=faults.UpstreamStoreRule(), ignored=frozenset({"I13"})
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


def test_scenario_09_upstream_store_rule_is_seen_at_gamma_5_and_right_at_gamma_3():
    violation = run_upstream_rule(5)
    assert violation is not None
    assert violation.prop == "I01"
    assert run_upstream_rule(3) is None
