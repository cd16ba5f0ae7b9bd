"""Sums over real gloo ranks: fixed order, one rounding, the same row bits however they travel."""

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing as mp

from dspark.kernels.collective import (
    GATHERED_ROWS,
    gather_vocab,
    ordered_sum,
    tp_argmax,
    tp_sum,
    transport,
)
from dspark.kernels.common.argmax import pack_argmax, token_of

ROWS, COLUMNS, VOCAB = 5, 64, 48


def partials(ranks: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ranks, ROWS, COLUMNS, generator=generator).bfloat16()


def in_fours(x: torch.Tensor) -> torch.Tensor:
    """(p0 + p1 + p2 + p3) + (p4 + p5 + p6 + p7) of up to eight ranks, rounded once."""
    first, second = x[:4].float(), x[4:].float()
    total = first[0]
    for part in first[1:]:
        total = total + part
    if len(second):
        rest = second[0]
        for part in second[1:]:
            rest = rest + part
        total = total + rest
    return total.bfloat16()


def vocabulary() -> torch.Tensor:
    """Five rows over 48 tokens; the last row is broken."""
    logits = torch.zeros(5, VOCAB)
    logits[0, 40] = 1.0
    logits[1, [3, 20, 40]] = 2.0  # a tie across ranks goes to the smallest id
    logits[2, :] = -5.0  # and so does a flat row
    logits[3, 47] = torch.inf
    logits[4] = torch.nan
    return logits.nan_to_num(nan=-torch.inf, posinf=torch.inf)


def _rank(rank: int, ranks: int, init_file: str, results) -> None:
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=ranks)
    mine = partials(ranks)[rank]
    group = dist.group.WORLD
    sums = {
        "whole": tp_sum(mine, group),
        "alone": torch.cat([tp_sum(row[None], group) for row in mine]),
        "reversed": tp_sum(mine.flip(0), group).flip(0),
        "strided": tp_sum(mine.T.contiguous().T, group),
        "three": torch.cat([tp_sum(mine[:3], group), tp_sum(mine[3:], group)]),
    }
    assert tp_sum(mine[:0], group).shape == (0, COLUMNS)
    logits, shard = vocabulary(), VOCAB // ranks
    own = logits[:, rank * shard : (rank + 1) * shard]
    winner = token_of(tp_argmax(pack_argmax(own, rank * shard), group))
    assert winner.tolist() == [40, 3, 0, 47, 0]
    assert torch.equal(gather_vocab(own, group), logits)
    results.put({name: total.float().tolist() for name, total in sums.items()})
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_ranks_hold_the_ordered_sum(tmp_path, ranks):
    """Three ranks cannot slice 64 columns evenly and gather whole rows."""
    context = mp.get_context("fork")  # spawned ranks would each import torch again
    results = context.SimpleQueue()
    arguments = [(rank, ranks, str(tmp_path / "init"), results) for rank in range(ranks)]
    processes = [context.Process(target=_rank, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    received = [results.get() for _ in range(ranks)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    want = in_fours(partials(ranks)).float().tolist()
    for sums in received:
        for name, total in sums.items():
            assert total == want, name


def _bytes_of(rank: int, ranks: int, init_file: str, results) -> None:
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=ranks)
    for rows in (1, GATHERED_ROWS, GATHERED_ROWS + 1, ROWS):
        transport.received.clear()
        tp_sum(partials(ranks)[rank, :rows], dist.group.WORLD)
        results.put((rows, transport.received["sum"]))
    dist.destroy_process_group()


def test_bytes_received_of_one_sum(tmp_path):
    """A row is 128 bytes: few rows come whole from three ranks, many as slices, twice."""
    context = mp.get_context("fork")
    results = context.SimpleQueue()
    arguments = [(rank, 4, str(tmp_path / "init"), results) for rank in range(4)]
    processes = [context.Process(target=_bytes_of, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    counted = {results.get() for _ in range(4 * 4)}
    assert counted == {(1, 3 * 128), (2, 3 * 256), (3, 2 * 3 * 96), (5, 2 * 3 * 160)}


def test_no_group_is_the_identity():
    x = partials(2)[0]
    assert tp_sum(x, None) is x


def test_the_order_of_the_sum():
    """Ascending within four ranks: 1 + 2^24 rounds the 1 away. Fours are added up on their own."""
    big = torch.tensor([[1.0]]), torch.tensor([[2.0**24]]), torch.tensor([[-(2.0**24)]])
    assert ordered_sum(torch.stack(big)).item() == 0.0
    nothing = torch.zeros(1, 1)
    apart = torch.stack([big[1], nothing, nothing, nothing, big[0], big[2]])
    assert ordered_sum(apart).item() == 1.0  # 2^24 + (1 - 2^24), each exact
    assert ordered_sum(torch.stack([big[0], *apart[:4], big[2]])).item() == 0.0
