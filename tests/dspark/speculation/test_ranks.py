"""Ranks that computed different things leave a step with the same decisions."""

import torch
from torch import distributed as dist
from torch import multiprocessing

from dspark.kernels.accept import Accept, accept_greedy
from dspark.speculation.ranks import agree, agree_on_accept

RANKS, REQUESTS, ROWS, VOCAB = 2, 3, 6, 32


def accept_of(rank: int) -> tuple[Accept, torch.Tensor]:
    """Greedy acceptance; rank 1's logits are noise, as after a memory error."""
    generator = torch.Generator().manual_seed(1)
    candidates = torch.randint(0, VOCAB, (REQUESTS, ROWS), generator=generator)
    logits = torch.zeros(REQUESTS * ROWS, VOCAB)
    following = torch.cat([candidates[:, 1:], candidates[:, :1]], 1).flatten()
    logits[torch.arange(len(logits)), following] = 5.0  # rank 0 accepts everything
    if rank == 1:
        logits = torch.randn(logits.shape, generator=generator)
    prefix = torch.tensor([10, 20, 30])
    lengths = torch.full((REQUESTS,), ROWS, dtype=torch.int32)
    return accept_greedy(candidates, logits, acceptable=lengths, committed=prefix), prefix


def run(rank: int, file: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    made, prefix = accept_of(rank)
    agreed = agree_on_accept(made, prefix, dist.group.WORLD)
    shared = agree(torch.arange(4) + 100 * rank, dist.group.WORLD)
    torch.save((tuple(agreed), shared), f"{out}{rank}")
    dist.destroy_process_group()


def test_rank_0_decides(tmp_path):
    multiprocessing.spawn(run, (str(tmp_path / "meet"), str(tmp_path / "rank")), nprocs=RANKS)
    expected, _ = accept_of(0)
    assert accept_of(1)[0].accepted.tolist() != expected.accepted.tolist()
    for rank in range(RANKS):
        agreed, shared = torch.load(tmp_path / f"rank{rank}")
        for name, ours, theirs in zip(Accept._fields, agreed, expected, strict=True):
            assert torch.equal(ours, theirs), name
            assert ours.dtype == theirs.dtype, name
        assert shared.tolist() == [0, 1, 2, 3]


def test_one_rank_changes_nothing():
    made, prefix = accept_of(0)
    assert agree_on_accept(made, prefix, None) is made
