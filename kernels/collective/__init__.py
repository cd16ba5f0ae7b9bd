"""What tensor-parallel ranks combine, with the same bits on every rank and in every batch."""

import torch
from torch import Tensor
from torch import distributed as dist

from dspark.kernels.collective import host_sum, reference, transport
from dspark.kernels.common.dispatch import op

Group = dist.ProcessGroup | None

ordered_sum = op(reference.ordered_sum)

GATHERED_ROWS = 2  # up to here one exchange of everything beats two of slices


def tp_sum(partial: Tensor, group: Group) -> Tensor:
    """Sum of `partial` [T, N] over the ranks of `group`, in the order of `ordered_sum`.

    An all-reduce adds in an order that follows the message size and the element's place in it;
    here element (t, n) never depends on T or on how it travelled, so a row has the same bits in
    every batch, and all ranks hold the same bits. Group None or of one rank: identity.

    Where the ranks have set it up, up to 64 rows go through the memory of the host in one launch.
    Otherwise few rows are gathered whole; more of them travel as slices: each rank receives its
    columns from everyone, adds them up and passes the sum on, so that less than two tensors arrive
    instead of ranks - 1.
    """
    if group is None or group.size() == 1 or partial.numel() == 0:
        return partial
    through_host = host_sum.CHOSEN.get(group)
    if through_host is not None and through_host.takes(partial):
        return through_host(partial)
    rows, columns = partial.shape
    ranks = group.size()
    if rows <= GATHERED_ROWS or columns % ranks:
        return ordered_sum(transport.gather(partial, group, "sum"))
    by_rank = partial.reshape(rows, ranks, columns // ranks).transpose(0, 1).contiguous()
    mine = ordered_sum(transport.exchange(by_rank, group, "sum"))  # [T, N / ranks]
    return transport.gather(mine, group, "sum").transpose(0, 1).reshape(rows, columns)


def tp_argmax(packed: Tensor, group: Group) -> Tensor:
    """Largest packed (value, id) of each row over the ranks, i64 [N] (see `argmax.pack`).

    Eight bytes a row travel instead of a vocabulary of logits.
    """
    if group is None or group.size() == 1 or packed.numel() == 0:
        return packed
    return transport.gather(packed, group, "argmax").amax(0)


def gather_vocab(x: Tensor, group: Group) -> Tensor:
    """Concatenate vocabulary shards along the last axis: [..., shard] -> [..., shard * ranks]."""
    if group is None or group.size() == 1:
        return x
    return torch.cat(list(transport.gather(x, group, "logits")), dim=-1)
