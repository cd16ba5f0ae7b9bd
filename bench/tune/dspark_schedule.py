"""Tune the verify schedule: requests x budget class."""

import sys
from functools import partial

import torch

from dspark.bench.tune.op import Case, Check, Launch, TunedOp, grid, seeded
from dspark.kernels.schedule import reference, schedule

GAMMA = 5
REQUESTS = {"smoke": (1, 8), "representative": tuple(range(1, 9))}
REQUESTS["exhaustive"] = (*REQUESTS["representative"], 16, 32, 64, 128, 256)


def build(requests: int, budget: int, device: torch.device, copies: int) -> Launch:
    random = seeded(device, requests)
    # A tensor each: slices of one would lose the alignment that the kernel is compiled for.
    confidence = [
        torch.rand(requests, GAMMA, device=device, generator=random) for _ in range(copies)
    ]
    admit = torch.tensor([budget], dtype=torch.int32, device=device)
    return lambda copy: schedule(confidence[copy], admit)


def cases(case_set: str) -> list[Case]:
    """Nothing admitted, two drafts a request, everything."""
    return [
        Case(f"r{r}-{label}", partial(build, r, budget), 4 * r * GAMMA)
        for r in REQUESTS[case_set]
        for label, budget in (("none", 0), ("part", 2 * r), ("full", GAMMA * r))
    ]


def check(requests: int, budget: int) -> Check:
    confidence = torch.rand(requests, GAMMA, generator=seeded(torch.device("cpu"), requests))
    confidence[0, 0] = float("nan")
    confidence[-1] = 0.5  # equal survivals
    admit = torch.tensor([budget], dtype=torch.int32)
    return Check(
        f"r{requests} budget {budget}",
        lambda device: schedule(confidence.to(device), admit.to(device)),
        lambda: reference.schedule(confidence, admit, eps=1e-6, min_len=1, max_len=GAMMA + 1),
        0.0,
    )


OPS = (
    TunedOp(
        "schedule",
        "schedule",
        cases,
        # The kernel counts integers, so neither blocks nor warps can change a result.
        grid([1, 2, 4], [1], BLOCK_R=[8, 16, 32, 64]),
        (check(1, 3), check(5, 9), check(4, 20)),
        aot=r"schedule\.schedule\[",
    ),
)

if __name__ == "__main__":
    from dspark.bench.tune.runner import run_module

    sys.exit(run_module("dspark.bench.tune.dspark_schedule", sys.argv[1:]))
