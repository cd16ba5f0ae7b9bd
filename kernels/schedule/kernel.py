"""Triton kernel of K26: one launch, one program per request, no atomics, no sort.

Each program recomputes the survival of every candidate of the batch (R * gamma products) and
counts how many stand before each of its own. That costs less than a second launch would.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.common.launch_table import LaunchConfig
from dspark.kernels.tooling.entries import AotEntry

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


def schedule(
    confidence: Tensor,
    budget: Tensor,
    *,
    eps: float,
    min_len: int,
    max_len: int,
    num_real: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    requests, gamma = confidence.shape
    if out is None:
        out = torch.empty(requests, dtype=torch.int32, device=confidence.device)
    columns = max_len - min_len
    if requests:
        launch = LAUNCH["schedule"]
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
            num_warps=launch.num_warps,
            **launch.constexprs,
        )
    return out


def _entry(shape: str, num_real: bool) -> AotEntry:
    launch = LAUNCH["schedule"]
    pointers = {"confidence": "*fp32", "budget": "*i32", "num_real": "*i32", "out": "*i32"}
    constexprs = {"COLUMNS": 5, "COLUMNS_P2": 8, **launch.constexprs}
    return AotEntry(
        name=f"schedule.schedule[{shape}]",
        fn=_schedule,
        signature={
            **pointers,
            "requests": "i32",
            "gamma": "i32",
            "eps": "fp32",
            "min_len": "i32",
        },
        constexprs=constexprs if num_real else {**constexprs, "num_real": None},
        divisible=tuple(pointers),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        expects_mma=False,
        hot=True,
    )


AOT = [_entry("gamma 5", False), _entry("gamma 5, padded", True)]
