"""Ranks that decide alike go on; one that differs is named, whichever it is."""

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing

from dspark.speculation import ranks
from dspark.speculation.sampling import BROKEN

RANKS, REQUESTS = 4, 5
TOKENS = torch.arange(REQUESTS * 6).view(REQUESTS, 6)


def gathering(monkeypatch, decisions, has_choice, broken):
    """Lists over ranks; `compare` as every rank sees it."""
    words = [ranks._word(*each) for each in zip(decisions, has_choice, broken, strict=True)]
    monkeypatch.setattr(ranks.transport, "gather", lambda *_: torch.stack(words))
    return ranks.compare(decisions[0], has_choice[0], broken[0], object())


@pytest.fixture
def sound():
    """Decisions, choices and broken shards of four ranks that agree."""
    generator = torch.Generator().manual_seed(0)
    decided = torch.randint(-1, 130_000, (REQUESTS, 16), generator=generator)
    yes, no = torch.ones(REQUESTS, dtype=torch.bool), torch.zeros(REQUESTS, dtype=torch.bool)
    return tuple([each.clone() for _ in range(RANKS)] for each in (decided, yes, no))


def test_ranks_that_agree_change_nothing(monkeypatch, sound):
    agreement = gathering(monkeypatch, *sound)
    assert agreement.fault.tolist() == [-1] * REQUESTS
    assert agreement.has_choice.all()
    assert torch.equal(ranks.mark(TOKENS, agreement), TOKENS)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("column", [0, 7, 15])
def test_a_rank_that_decides_otherwise_is_named(monkeypatch, sound, rank, column):
    sound[0][rank][2, column] += 1
    marked = ranks.mark(TOKENS, gathering(monkeypatch, *sound))
    assert marked[[0, 1, 3, 4]].tolist() == TOKENS[[0, 1, 3, 4]].tolist()
    assert marked[2, 0] < BROKEN
    with pytest.raises(ranks.RankFault, match=f"^Rank {rank} decided on other tokens than"):
        ranks.raise_fault(int(marked[2, 0]))


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_whose_logits_alone_are_broken_is_named(monkeypatch, sound, rank):
    sound[2][rank][4] = True
    marked = ranks.mark(TOKENS, gathering(monkeypatch, *sound))
    with pytest.raises(ranks.RankFault, match=f"^Rank {rank} computed logits that are not numb"):
        ranks.raise_fault(int(marked[4, 0]))


def test_logits_broken_on_every_rank_are_the_requests_own_affair(monkeypatch, sound):
    for rank in range(RANKS):
        sound[1][rank][1], sound[2][rank][1] = False, True
    agreement = gathering(monkeypatch, *sound)
    assert agreement.fault.tolist() == [-1] * REQUESTS
    assert agreement.has_choice.tolist() == [True, False, True, True, True]


def test_one_rank_with_a_choice_is_enough(monkeypatch, sound):
    """The largest logits may all lie in one rank's columns."""
    for rank in range(1, RANKS):
        sound[1][rank][:] = False
    assert gathering(monkeypatch, *sound).has_choice.all()


def test_order_and_place_of_decisions_count():
    yes, no = torch.tensor([True]), torch.tensor([False])
    words = {
        int(ranks._word(torch.tensor([decided]), yes, no))
        for decided in ([1, 2], [2, 1], [1, 2, 0], [0, 1, 2], [3, 0], [0, 3])
    }
    assert len(words) == 6


def test_one_rank_alone_compares_nothing():
    choice = torch.tensor([True, False])
    agreement = ranks.compare(torch.zeros(2, 1).long(), choice, ~choice, None)
    assert agreement.has_choice is choice
    assert agreement.fault is None
    assert ranks.mark(TOKENS, agreement) is TOKENS
    assert not ranks.broken_rows(torch.full((2, 3), torch.nan), None).any()


def _rank(rank: int, file: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    decided = torch.tensor([[7, 8], [9, 10 + rank]])
    choice = torch.tensor([True, True])
    agreement = ranks.compare(decided, choice, ~choice, dist.group.WORLD)
    torch.save(ranks.mark(TOKENS[:2], agreement), f"{out}{rank}")
    dist.destroy_process_group()


def test_both_of_two_real_ranks_name_the_same(tmp_path):
    multiprocessing.spawn(_rank, (str(tmp_path / "meet"), str(tmp_path / "rank")), nprocs=2)
    first, second = torch.load(tmp_path / "rank0"), torch.load(tmp_path / "rank1")
    assert torch.equal(first, second)
    assert torch.equal(first[0], TOKENS[0])
    with pytest.raises(ranks.RankFault, match=r"^Rank 1 "):
        ranks.raise_fault(int(first[1, 0]))
