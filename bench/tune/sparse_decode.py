"""Tune sparse attention in decode and verify: rows x context, window and C4 entries."""

import sys
from functools import partial

import torch

from dspark.bench.tune.attention_inputs import SLOT_BYTES, TOPK, WINDOW, Shape, make
from dspark.bench.tune.op import Case, Check, Launch, TunedOp, grid
from dspark.kernels.attention import mla_sparse, reference
from dspark.kernels.attention.kernel import LAUNCH

HEADS = 8  # of one of eight ranks
PAGES = 1024  # 150 MB of window slots and 37 MB of C4 entries: the lists reach past any L2
SHAPES = {
    "smoke": [(1, 1024), (8, 8192), (48, 8192)],
    "representative": [
        (rows, context) for rows in (1, 2, 4, 6, 8, 12, 24, 48) for context in (256, 1024, 8192)
    ],
}
SHAPES["exhaustive"] = [
    (rows, context) for rows in range(1, 49) for context in (128, 256, 512, 1024, 2048, 8192)
]


def build(rows: int, entries: int, device: torch.device, copies: int) -> Launch:
    inputs = make(Shape(rows, HEADS, WINDOW, entries, PAGES), device, copies, seed=rows)
    return lambda copy: mla_sparse(*inputs.arguments(copy))


def cases(case_set: str) -> list[Case]:
    result = []
    for rows, context in SHAPES[case_set]:
        entries = min(TOPK, context // 4)
        moved = rows * (WINDOW + entries) * SLOT_BYTES
        result.append(Case(f"t{rows}-c{context}", partial(build, rows, entries), moved))
    return result


def check(rows: int, heads: int, window: int, entries: int) -> Check:
    inputs = make(Shape(rows, heads, window, entries, 2), torch.device("cpu"), 1, seed=rows)
    return Check(
        f"t{rows}-h{heads}-w{window}-e{entries}",
        lambda device: mla_sparse(*inputs.to(device).arguments(0)),
        lambda: reference.mla_sparse(*inputs.arguments(0)),
        5e-3,
    )


CHECKS = (check(2, 4, 70, 40),)
OPS = (
    TunedOp(
        "attention",
        "decode",
        cases,
        # CH fixes the order of the sums and stays; one tile a split leaves nothing to pipeline.
        grid([4, 8, 16], [1], LAUNCH["decode"].constexprs),
        CHECKS,
        aot=r"attention\.decode$",
    ),
    TunedOp(
        "attention",
        "combine",
        cases,
        # GROUP fixes the order of the sums and stays; BD cuts the output columns.
        grid([1, 2, 4, 8], [1], {"GROUP": LAUNCH["combine"].constexprs["GROUP"]},
             BD=[64, 128, 256, 512]),
        CHECKS,
        aot=r"attention\.combine$",
    ),
)  # fmt: skip

if __name__ == "__main__":
    from dspark.bench.tune.runner import run_module

    sys.exit(run_module("dspark.bench.tune.sparse_decode", sys.argv[1:]))
