"""Tune the MXFP4 experts: one rank of eight of the 256-expert model."""

import functools
import sys
from collections.abc import Sequence
from functools import partial

import torch

from dspark.bench.tune.op import Case, Check, Launch, TunedOp, grid, seeded
from dspark.kernels.moe import ExpertWeights, Route, moe_mxfp4, prepare_experts, reference
from dspark.kernels.moe.kernel import LAUNCH
from dspark.kernels.moe.words import streamed

EXPERTS, HIDDEN, WIDTH, TOPK, LIMIT = 256, 4096, 256, 6, 10.0
EXPERT_BYTES = 3 * WIDTH * HIDDEN // 2 * 17 // 16  # packed weights and their scales
ROWS: dict[str, dict[str, Sequence[int]]] = {
    "one": {"smoke": (1,), "representative": (1, 2, 3), "exhaustive": (1, 2, 3)},
    "few": {"smoke": (1, 8), "representative": (1, 2, 4, 6, 8), "exhaustive": range(1, 11)},
    "many": {"smoke": (12, 48), "representative": (12, 24, 48), "exhaustive": range(12, 86, 6)},
    "sorted": {"smoke": (96,), "representative": (96, 144, 288), "exhaustive": range(86, 342, 17)},
    "prefill": {"smoke": (512,), "representative": (342, 512, 2048),
                "exhaustive": (342, 512, 1024, 2048, 4096)},
}  # fmt: skip


def random_bytes(device: torch.device, count: int, hidden: int, width: int) -> list[torch.Tensor]:
    """w13, s13, w2 and s2 of a checkpoint; scales from 2^-12 to 2^-6."""
    random = seeded(device, 1)

    def byte(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=random)

    return [
        byte(count, 2 * width, hidden // 2),
        byte(count, 2 * width, hidden // 32, low=115, high=122),
        byte(count, hidden, width // 2),
        byte(count, hidden, width // 32, low=115, high=122),
    ]


@functools.cache
def rank_experts(device: torch.device) -> ExpertWeights:
    """428 MB, shared by all cases."""
    return prepare_experts(*random_bytes(device, EXPERTS, HIDDEN, WIDTH))


def random_route(rows: int, count: int, topk: int, random: torch.Generator) -> Route:
    """`topk` different experts a row, in ascending order."""
    device = random.device
    experts = torch.rand(rows, count, device=device, generator=random).argsort(1)[:, :topk]
    weights = torch.rand(rows, topk, device=device, generator=random)
    return Route(weights, experts.sort(1).values.int().contiguous())


def build(rows: int, device: torch.device, copies: int) -> Launch:
    random = seeded(device, rows)
    experts = rank_experts(device)
    x = torch.randn(copies, rows, HIDDEN, device=device, generator=random).bfloat16()
    routes = [random_route(rows, EXPERTS, TOPK, random) for _ in range(copies)]
    return lambda copy: moe_mxfp4(x[copy], experts, routes[copy], LIMIT, None)


def distinct_experts(rows: int) -> float:
    """Expected experts of independent uniform routes."""
    return EXPERTS * (1 - (1 - TOPK / EXPERTS) ** rows)


def cases(regime: str, least: int, case_set: str) -> list[Case]:
    return [
        Case(f"t{rows}", partial(build, rows), int(distinct_experts(rows) * EXPERT_BYTES))
        for rows in ROWS[regime][case_set]
        if rows >= least
    ]


def check(rows: int) -> Check:
    cpu = torch.device("cpu")
    random = seeded(cpu, rows)
    packed = random_bytes(cpu, 4, 256, 64)
    x = torch.randn(rows, 256, generator=random).bfloat16()
    route = random_route(rows, 4, 2, random)

    def run(device: torch.device) -> torch.Tensor:
        experts = streamed(*(part.to(device) for part in packed))
        moved = Route(*(part.to(device) for part in route))
        return moe_mxfp4(x.to(device), experts, moved, LIMIT, None)

    def expected() -> torch.Tensor:
        return reference.moe_mxfp4(x, prepare_experts(*packed), route, LIMIT, None)

    return Check(f"t{rows} of 4 experts", run, expected, 5e-3)


def op(
    kernel: str, regime: str, column: str, choices: list[int], rows: int, least: int = 1
) -> TunedOp:
    """BM stays because it belongs to the regime. rows: of the check; least: of the timed cases."""
    entry = f"{kernel}.{regime}"
    constants = dict(LAUNCH[entry].constexprs)
    del constants[column]
    return TunedOp(
        "moe",
        entry,
        partial(cases, regime, least),
        grid([4, 8], [2, 3, 4], constants, **{column: choices}),
        (check(rows),),
        aot=rf"moe\.{kernel}\[{regime}\]",
    )


# 3, 10, 40, 300 and 1,100 rows of two experts reach the regimes in the small check.
OPS = (
    op("down", "one", "BN", [16, 32, 64], 3),
    op("gate_up", "few", "BI", [8, 16, 32], 10),
    op("down", "few", "BN", [32, 64, 128], 10, least=4),
    *(
        op(kernel, regime, column, choices, rows)
        for regime, rows in (("many", 40), ("sorted", 300), ("prefill", 1100))
        for kernel, column, choices in (
            ("gate_up", "BI", [16, 32, 64]),
            ("down", "BN", [64, 128, 256]),
        )
    ),
)

if __name__ == "__main__":
    from dspark.bench.tune.runner import run_module

    sys.exit(run_module("dspark.bench.tune.moe", sys.argv[1:]))
