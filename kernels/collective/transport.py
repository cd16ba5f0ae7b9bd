"""What travels between tensor-parallel ranks, as bytes over any process group, and how much of it.

Not every backend moves every dtype, so everything travels as bytes.
"""

from collections import Counter

import torch
from torch import Tensor
from torch import distributed as dist

# Bytes this rank received from the others since start, by purpose. Eager calls only: a replayed
# graph calls no Python, and moves what was counted while it was captured.
received: Counter[str] = Counter()


def gather(x: Tensor, group: dist.ProcessGroup, purpose: str) -> Tensor:
    """All-gather along a new leading rank axis: [...] -> [ranks, ...]."""
    gathered = torch.empty(group.size(), *x.shape, dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(_bytes(gathered), _bytes(x.contiguous()), group=group)
    _count(x.nbytes, group, purpose)
    return gathered


def exchange(parts: Tensor, group: dist.ProcessGroup, purpose: str) -> Tensor:
    """Part r of every rank, on rank r: [ranks, ...] by receiver -> [ranks, ...] by sender."""
    theirs = torch.empty_like(parts)
    dist.all_to_all_single(_bytes(theirs), _bytes(parts), group=group)
    _count(parts[0].nbytes, group, purpose)
    return theirs


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _count(nbytes_from_each: int, group: dist.ProcessGroup, purpose: str) -> None:
    received[purpose] += nbytes_from_each * (group.size() - 1)
