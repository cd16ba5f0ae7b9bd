"""K28 over real gloo ranks: rank order, one rounding, the same row bits in every batch."""

import torch
from torch import distributed as dist
from torch import multiprocessing as mp

from dspark.kernels.collective import gather_vocab, ordered_sum, tp_argmax, tp_sum
from dspark.kernels.common.argmax import pack_argmax, token_of

RANKS = 3


def partials() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(RANKS, 5, 64, generator=generator).bfloat16()


def vocabulary() -> torch.Tensor:
    """Five rows over 48 tokens; the last row is broken."""
    logits = torch.zeros(5, 48)
    logits[0, 40] = 1.0
    logits[1, [3, 20, 40]] = 2.0  # a tie across ranks goes to the smallest id
    logits[2, :] = -5.0  # and so does a flat row
    logits[3, 47] = torch.inf
    logits[4] = torch.nan
    return logits.nan_to_num(nan=-torch.inf, posinf=torch.inf)


def _rank(rank: int, init_file: str, results) -> None:
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=RANKS)
    mine = partials()[rank]
    group = dist.group.WORLD
    whole = tp_sum(mine, group)
    alone = torch.cat([tp_sum(row[None], group) for row in mine])
    strided = tp_sum(mine.T.contiguous().T, group)
    nothing = tp_sum(mine[:0], group)
    assert nothing.shape == (0, 64)
    logits = vocabulary()
    shard = logits[:, rank * 16 : (rank + 1) * 16]
    winner = token_of(tp_argmax(pack_argmax(shard, rank * 16), group))
    assert winner.tolist() == [40, 3, 0, 47, 0]
    assert torch.equal(gather_vocab(shard, group), logits)
    results.put((rank, whole.float().tolist(), alone.float().tolist(), strided.float().tolist()))
    dist.destroy_process_group()


def test_all_ranks_hold_the_ordered_sum(tmp_path):
    context = mp.get_context("fork")  # spawned ranks would each import torch again
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(rank, str(tmp_path / "init"), results), daemon=True)
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    received = [results.get() for _ in range(RANKS)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    x = partials().float()
    want = ((x[0] + x[1]) + x[2]).bfloat16().float().tolist()
    for rank, whole, alone, strided in received:
        assert whole == want, rank
        assert alone == want, rank
        assert strided == want, rank


def test_no_group_is_the_identity():
    x = partials()[0]
    assert tp_sum(x, None) is x


def test_the_order_of_the_sum_is_ascending():
    big = torch.tensor([[1.0]]), torch.tensor([[2.0**24]]), torch.tensor([[-(2.0**24)]])
    assert ordered_sum(torch.stack(big)).item() == 0.0  # (1 + 2^24) rounds the 1 away
