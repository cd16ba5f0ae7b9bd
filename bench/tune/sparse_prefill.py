"""Tune sparse attention in prefill: the kernel after the gather, on lists as prefill makes them.

The public op waits for the device between its kernels, which a graph cannot hold, so the timed
cases launch the attention kernel alone.
"""

import sys
from functools import partial

import torch
import triton

from dspark.bench.tune.attention_inputs import TOPK, WINDOW, Shape, make
from dspark.bench.tune.op import Case, Check, Launch, TunedOp, grid, seeded
from dspark.kernels.attention import mla_sparse, reference
from dspark.kernels.attention.kernel import LAUNCH, _prefill
from dspark.kernels.common.kv_pages import HEAD

HEADS = 8  # of one of eight ranks
SHAPES = {
    "smoke": [(128, 1024), (512, 8192)],
    "representative": [(rows, context) for rows in (128, 512, 2048) for context in (1024, 8192)],
}
SHAPES["exhaustive"] = [
    (rows, context)
    for rows in (65, 128, 256, 512, 1024, 2048, 4096)
    for context in (256, 1024, 8192)
]


def build(rows: int, entries: int, device: torch.device, copies: int) -> Launch:
    random = seeded(device, rows)
    slots = rows + WINDOW + 4 * entries
    kv = torch.randn(slots, HEAD, device=device, generator=random).bfloat16()
    q = torch.randn(copies, rows, HEADS, HEAD, device=device, generator=random).bfloat16()
    width = WINDOW + entries
    size = (rows, width)
    idx = torch.randint(0, slots, size, device=device, generator=random).int().sort(1).values
    length = torch.full((rows,), width, dtype=torch.int32, device=device)
    sink = torch.randn(HEADS, device=device, generator=random)
    cos_sin = torch.randn(256, 64, device=device, generator=random)
    pos = torch.zeros(rows, dtype=torch.int64, device=device)

    def launch(copy: int) -> torch.Tensor:
        config = LAUNCH["prefill"]
        out = torch.empty_like(q[copy])
        _prefill[(rows, triton.cdiv(HEADS, config.constexprs["BH"]))](
            q[copy], kv, idx, length, sink, cos_sin, pos, out, HEAD**-0.5, HEADS, width,
            ROTATE=True, num_warps=config.num_warps, num_stages=config.num_stages,
            **config.constexprs,
        )  # fmt: skip
        return out

    return launch


def cases(case_set: str) -> list[Case]:
    return [
        Case(
            f"t{rows}-c{context}",
            partial(build, rows, min(TOPK, context // 4)),
            rows * HEADS * HEAD * 2,
        )
        for rows, context in SHAPES[case_set]
    ]


def check() -> Check:
    """Few rows on the prefill path."""
    inputs = make(Shape(2, 4, 70, 40, 2), torch.device("cpu"), 1, seed=3)

    def run(device: torch.device) -> torch.Tensor:
        return mla_sparse(*inputs.to(device).arguments(0), running=False)

    return Check("t2-h4-w70-e40", run, lambda: reference.mla_sparse(*inputs.arguments(0)), 5e-3)


OPS = (
    TunedOp(
        "attention",
        "prefill",
        cases,
        # BK fixes the order of the sums and stays.
        grid([4, 8], [1, 2, 3], LAUNCH["prefill"].constexprs),
        (check(),),
        aot=r"attention\.prefill$",
    ),
)

if __name__ == "__main__":
    from dspark.bench.tune.runner import run_module

    sys.exit(run_module("dspark.bench.tune.sparse_prefill", sys.argv[1:]))
