"""How ranks sum: nothing is tried on a CPU or on one rank, and nothing that fails ends a server."""

import logging

import pytest
import torch

from dspark.host import rank_sums
from dspark.kernels.collective import host_start
from dspark.kernels.collective.host_sum import CHOSEN

SLICES = "gathered up to 2 rows, column slices from there on"
HOST = "host memory up to 64 rows, column slices from there on"


class Group:
    """Rank 0 of eight."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 8


@pytest.fixture
def asked(monkeypatch):
    """Calls of `set_up`, which does what `asked.outcome` says."""
    calls = []

    def set_up(group, device, columns):
        calls.append((device, columns))
        return set_up.outcome()

    set_up.calls = calls
    monkeypatch.setattr(host_start, "set_up", set_up)
    return set_up


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_neither_one_rank_nor_a_cpu_touches_host_memory(asked):
    rank_sums.choose(None, torch.device("cuda"), 4096)
    rank_sums.choose(Group(), torch.device("cpu"), 4096)
    assert asked.calls == []
    assert rank_sums.transport(None) == "none, one rank"
    assert rank_sums.transport(Group()) == SLICES


def test_what_is_chosen_is_said(asked, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    group = Group()

    def chosen():
        monkeypatch.setitem(CHOSEN, group, "a sum")
        return host_start.Outcome("a sum", "")

    asked.outcome = chosen
    rank_sums.choose(group, torch.device("cuda"), 4096)
    assert asked.calls == [(torch.device("cuda"), 4096)]
    assert said(caplog) == [f"Sums over 8 ranks: {HOST}."]
    assert rank_sums.transport(group) == HOST


def test_why_it_was_not_chosen_is_said(asked, caplog):
    caplog.set_level(logging.INFO)
    asked.outcome = lambda: host_start.Outcome(None, "rank 3 could not")
    rank_sums.choose(Group(), torch.device("cuda"), 4096)
    assert said(caplog) == [f"Sums over 8 ranks: {SLICES} (rank 3 could not)."]


def test_an_error_is_one_line_and_ends_nothing(asked, caplog):
    caplog.set_level(logging.INFO)

    def broken():
        raise RuntimeError("it broke\nin two lines")

    asked.outcome = broken
    rank_sums.choose(Group(), torch.device("cuda"), 4096)
    assert said(caplog) == [f"Sums over 8 ranks: {SLICES} (it broke)."]
