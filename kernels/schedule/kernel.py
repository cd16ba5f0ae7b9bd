"""Triton kernel of the schedule: one launch, one program per request, no atomics, no sort.

Each program recomputes the survival of every candidate of the batch (R * gamma products) and
counts how many stand before each of its own. That costs less than a second launch would.
"""

import torch
import triton
import triton.language as tl

from dspark.kernels.common.launch_table import LaunchConfig

LAUNCH = {"schedule": LaunchConfig(1, 1, {"BLOCK_R": 32})}


@triton.jit
def _confidence(confidence, request, valid, i, gamma):
    """Confidence of draft i of each request, NaN as 0, in [0, 1]; 0 where not valid."""
    c = tl.load(confidence + request * gamma + i, mask=valid, other=0.0)
    return tl.where(c > 0, tl.minimum(c, 1.0), 0.0)


@triton.jit
def _schedule(
    confidence,
    budget,
    num_real,
    out,
    requests,
    gamma,
    eps,
    min_len,
    COLUMNS: tl.constexpr,  # drafts of a request that a verify could hold
    COLUMNS_P2: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    r = tl.program_id(0)
    real = requests if num_real is None else tl.load(num_real)
    admit = tl.load(budget)
    column = tl.arange(0, COLUMNS_P2)
    mine = tl.full([COLUMNS_P2], -1.0, tl.float32)
    survival = 1.0
    for i in tl.static_range(COLUMNS):
        survival *= _confidence(confidence, r, r < real, i, gamma)
        mine = tl.where(column == i, survival, mine)
    alive = mine >= eps

    if admit <= 0:
        selected = alive & (column < 0)
    elif admit >= real * COLUMNS:
        selected = alive
    else:
        before = tl.zeros([COLUMNS_P2, BLOCK_R], tl.int32)
        for first in range(0, real, BLOCK_R):
            other = first + tl.arange(0, BLOCK_R)
            theirs = tl.full([BLOCK_R], 1.0, tl.float32)
            for i in tl.static_range(COLUMNS):
                theirs *= _confidence(confidence, other, other < real, i, gamma)
                greater = theirs[None, :] > mine[:, None]
                equal = theirs[None, :] == mine[:, None]
                earlier = (column[:, None] > i) | ((column[:, None] == i) & (other[None, :] < r))
                wins = (greater | (equal & earlier)) & (theirs[None, :] >= eps)
                before += wins.to(tl.int32)
        selected = alive & (tl.sum(before, axis=1) < admit)
    length = min_len + tl.sum(selected.to(tl.int32), axis=0)
    tl.store(out + r, tl.where(r < real, length, 0))


def schedule(confidence, budget, *, eps=1e-06, min_len=1, max_len=None, num_real=None):
    requests, gamma = confidence.shape
    out = torch.empty(requests, dtype=torch.int32, device=confidence.device)
    columns = (gamma + 1 if max_len is None else max_len) - min_len
    if requests:
        _schedule[(requests,)](
            confidence.contiguous(),
            budget,
            num_real,
            out,
            requests,
            gamma,
            eps,
            min_len,
            COLUMNS=columns,
            COLUMNS_P2=triton.next_power_of_2(max(columns, 1)),
            **LAUNCH["schedule"].keywords,
        )
    return out
