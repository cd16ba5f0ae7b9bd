"""K28 and its companions: what tensor-parallel ranks combine, always in rank order."""

import torch
from torch import Tensor
from torch import distributed as dist

from dspark.kernels.common.dispatch import use_triton

Group = dist.ProcessGroup | None


def tp_sum(partial: Tensor, group: Group) -> Tensor:
    """Sum of `partial` [T, N] over the ranks of `group`: gathered, added in rank order in fp32,
    rounded once to the dtype of `partial`.

    An all-reduce adds in an order that follows the message size and the element's place in it;
    here element (t, n) never depends on T, so a row has the same bits in every batch, and all
    ranks hold the same bits. Group None or of one rank: identity.
    """
    if group is None or group.size() == 1 or partial.numel() == 0:
        return partial
    return ordered_sum(gather(partial, group))


def tp_argmax(packed: Tensor, group: Group) -> Tensor:
    """Largest packed (value, id) of each row over the ranks, i64 [N] (see `argmax.pack`).

    Eight bytes a row travel instead of a vocabulary of logits.
    """
    if group is None or group.size() == 1 or packed.numel() == 0:
        return packed
    return gather(packed, group).amax(0)


def gather_vocab(x: Tensor, group: Group) -> Tensor:
    """Concatenate vocabulary shards along the last axis: [..., shard] -> [..., shard * ranks]."""
    if group is None or group.size() == 1:
        return x
    return torch.cat(list(gather(x, group)), dim=-1)


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather along a new leading rank axis: [T, N] -> [ranks, T, N]."""
    ranks = group.size()
    gathered = torch.empty(ranks, *x.shape, dtype=x.dtype, device=x.device)
    # As bytes: not every backend moves every dtype.
    dist.all_gather_into_tensor(
        gathered.view(-1).view(torch.uint8), x.contiguous().view(-1).view(torch.uint8), group=group
    )
    return gathered


def ordered_sum(gathered: Tensor) -> Tensor:
    """Sum of [ranks, ...] over ranks: fp32, ascending, rounded once to the dtype of `gathered`."""
    if use_triton(gathered):
        from dspark.kernels.collective.kernel import ordered_sum as implementation
    else:
        from dspark.kernels.collective.reference import ordered_sum as implementation
    return implementation(gathered)
