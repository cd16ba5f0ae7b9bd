"""Tensor-parallel ranks must take the same decisions, or their next collectives do not match.

Every rank computes the same bits already. Rank 0's decision is passed on all the same: a rank
whose memory is corrupted then emits wrong tokens instead of stopping the server.
"""

import torch
from torch import distributed as dist

from dspark.kernels.accept import Accept
from dspark.kernels.collective import Group
from dspark.speculation.budget import VerifyRows


def agree(values: torch.Tensor, group: Group) -> torch.Tensor:
    """i64 [R, ...] as rank 0 has them."""
    if group is None:
        return values
    shared = values.contiguous()
    dist.broadcast(shared, src=dist.get_global_rank(group, 0), group=group)
    return shared


def agree_on_candidates(
    candidates: torch.Tensor, rows: VerifyRows, group: Group
) -> tuple[torch.Tensor, VerifyRows]:
    """candidates: i64 [R, V]. Returns both as rank 0 has them."""
    if group is None:
        return candidates, rows
    width = candidates.shape[1]
    counts = torch.stack([rows.run, rows.acceptable], 1).to(torch.int64)
    shared = agree(torch.cat([candidates, counts], 1), group)
    run, acceptable = shared[:, width].to(torch.int32), shared[:, width + 1].to(torch.int32)
    return shared[:, :width].contiguous(), VerifyRows(run, acceptable)


def agree_on_accept(accept: Accept, committed: torch.Tensor, group: Group) -> Accept:
    """committed: i64 [R] committed lengths before the step."""
    if group is None:
        return accept
    counts = torch.stack([accept.accepted, accept.trimmed], 1).to(torch.int64)
    shared = agree(torch.cat([accept.tokens, accept.bonus[:, None], counts], 1), group)
    accepted, trimmed = shared[:, -2].to(torch.int32), shared[:, -1].to(torch.int32)
    commit_len = accepted + 1
    return Accept(
        accepted, shared[:, -3], commit_len, committed + commit_len, trimmed, shared[:, :-3]
    )
