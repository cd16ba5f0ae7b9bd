"""Triton kernel of the ordered sum of gathered rank partials."""

import torch
import triton
import triton.language as tl

from dspark.kernels.common.launch_table import LaunchConfig

LAUNCH = {
    "ordered_sum": LaunchConfig(4, 1, {"BLOCK": 1024}),
    "host_one_shot": LaunchConfig(8, 1, {}),
    "host_two_shot": LaunchConfig(8, 1, {}),
}


@triton.jit
def _ordered_sum(gathered, out, n, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    for first in tl.static_range(0, RANKS, 4):
        four = tl.load(gathered + first * n.to(tl.int64) + i, mask=mask, other=0).to(tl.float32)
        for rank in tl.static_range(first + 1, first + 4):
            if rank < RANKS:
                part = tl.load(gathered + rank * n.to(tl.int64) + i, mask=mask, other=0)
                four += part.to(tl.float32)
        if first == 0:
            total = four
        else:
            total += four
    tl.store(out + i, total.to(out.dtype.element_ty), mask=mask)


def ordered_sum(gathered):
    out = torch.empty_like(gathered[0])
    launch = LAUNCH["ordered_sum"]
    if out.numel():
        _ordered_sum[(triton.cdiv(out.numel(), launch.constexprs["BLOCK"]),)](
            gathered.contiguous(),
            out,
            out.numel(),
            RANKS=gathered.shape[0],
            **launch.keywords,
        )
    return out
