"""Tune the FP8 linear on the matrices of one of eight ranks."""

import sys
from collections.abc import Sequence
from functools import partial

import torch

from dspark.bench.tune.op import Case, Check, Launch, TunedOp, grid, seeded
from dspark.kernels.linear import (
    Fp8Weight,
    dequantise_fp8,
    fp8_linear,
    grouped_linear,
    prepare_fp8,
    reference,
    swiglu_linear,
)
from dspark.kernels.linear.kernel import LAUNCH

LIMIT = 10.0
# name -> outputs, inputs. `wo_a` is used without activation quantiser, `shared_w2` after SwiGLU.
MATRICES = {
    "wqkv_a": (1536, 4096),
    "wq_b": (4096, 1024),
    "wo_a": (1024, 4096),
    "shared_w2": (4096, 256),
}
ROWS: dict[str, dict[str, Sequence[int]]] = {
    "few": {"smoke": (1, 8), "representative": (1, 2, 4, 6, 8, 12), "exhaustive": range(1, 17)},
    "many": {"smoke": (48,), "representative": (24, 48), "exhaustive": (17, 24, 32, 48, 64)},
}


def random_weight(outputs: int, k: int, random: torch.Generator) -> Fp8Weight:
    device = random.device
    codes = torch.randn(outputs, k, device=device, generator=random).to(torch.float8_e4m3fn)
    blocks = (-(-outputs // 128), -(-k // 128))
    scales = torch.randint(118, 124, blocks, device=device, generator=random)
    return prepare_fp8(codes, scales.to(torch.uint8))


def apply(name: str, x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    if name == "wo_a":
        return grouped_linear(x.unsqueeze(1), weight)
    if name == "shared_w2":
        return swiglu_linear(x, weight, LIMIT, act_dtype=torch.bfloat16)
    return fp8_linear(x, weight)


def activation(name: str, rows: int, k: int, random: torch.Generator) -> torch.Tensor:
    columns = 2 * k if name == "shared_w2" else k
    x = torch.randn(rows, columns, device=random.device, generator=random)
    return x if name == "shared_w2" else x.bfloat16()


def build(name: str, rows: int, device: torch.device, copies: int) -> Launch:
    outputs, k = MATRICES[name]
    random = seeded(device, rows)
    weights = [random_weight(outputs, k, random) for _ in range(copies)]
    x = activation(name, rows, k, random)
    return lambda copy: apply(name, x, weights[copy])


def cases(regime: str, case_set: str) -> list[Case]:
    return [
        Case(f"{name}-t{rows}", partial(build, name, rows), outputs * k)
        for name, (outputs, k) in MATRICES.items()
        # Gate and up in f32 always take the short tile.
        if regime == "few" or name != "shared_w2"
        for rows in ROWS[regime][case_set]
    ]


def check(name: str, rows: int) -> Check:
    cpu = torch.device("cpu")
    random = seeded(cpu, rows)
    codes, scales, _ = random_weight(128, 512, random)
    x = activation(name, rows, 512, random)

    def expected() -> torch.Tensor:
        weight = Fp8Weight(codes, scales, dequantise_fp8(codes, scales).double())
        if name == "wo_a":
            return reference.grouped_linear(x.unsqueeze(1), weight)
        if name == "shared_w2":
            return reference.swiglu_linear(x, weight, LIMIT, act_dtype=torch.bfloat16)
        return reference.fp8_linear(x, weight, None)

    def run(device: torch.device) -> torch.Tensor:
        return apply(name, x.to(device), prepare_fp8(codes.to(device), scales.to(device)))

    return Check(f"{name} {rows}x128x512", run, expected, 5e-3)


def op(regime: str, rows: int, stages: list[int]) -> TunedOp:
    """BM stays: it belongs to the regime."""
    entry = f"fp8.{regime}"
    block_m = {"BM": LAUNCH[entry].constexprs["BM"]}
    names = [n for n in ("wq_b", "wo_a", "shared_w2") if regime == "few" or n != "shared_w2"]
    return TunedOp(
        "linear",
        entry,
        partial(cases, regime),
        grid([4, 8], stages, block_m, BN=[32, 64, 128]),
        tuple(check(name, rows) for name in names),
        aot=rf"linear\.linear\[(w8a8|w8a16|swiglu) .*, {regime}\]",
    )


OPS = (op("few", 3, [3, 4, 5]), op("many", 20, [2, 3, 4]))

if __name__ == "__main__":
    from dspark.bench.tune.runner import run_module

    sys.exit(run_module("dspark.bench.tune.fp8_linear", sys.argv[1:]))
