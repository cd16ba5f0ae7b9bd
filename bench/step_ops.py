"""What one decode step of one rank (of eight) costs in kernels: every op, timed alone, added up.

43 layers: 2 with a window only, 21 C4, 20 C128. Collectives, launch gaps and the host are not in
it, so a real step takes longer; ops that overlap or share caches could make it shorter.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from dspark.bench import kv_ops
from dspark.bench.graph_time import graph_time
from dspark.bench.op_case import OpCase, copies_on
from dspark.bench.table import counted
from dspark.bench.tune import moe as moe_inputs
from dspark.bench.tune.fp8_linear import random_weight
from dspark.bench.tune.op import seeded
from dspark.kernels.hyper import (
    HyperNumbers,
    HyperSite,
    mhc_head,
    mhc_post,
    mhc_post_pre,
    mhc_pre,
    prepare_hyper,
)
from dspark.kernels.linear import (
    bf16_linear,
    bf16_linear_parts,
    fp8_linear,
    fp8_linear_parts,
    grouped_linear,
    prepare_bf16,
    rms_norm,
    swiglu_linear,
)
from dspark.kernels.moe import moe_mxfp4, route

CUDA = torch.device("cuda")
HIDDEN, LATENT, EPS, SINKHORN, LIMIT = 4096, 1024, 1e-6, 20, 10.0
QUERY, INDEX_QUERY = 8 * 512, 64 * 128
LAYERS = {"window": 2, "c4": 21, "c128": 20}
ALL = sum(LAYERS.values())
VOCAB_SHARD = 16_160


class StepOp(NamedTuple):
    calls: int  # in a step
    case: OpCase


def rows_of(rows: int, columns: int, random: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, device=random.device, generator=random)


def fp8_ops(rows: int, device: torch.device = CUDA) -> Iterator[StepOp]:
    """Matrices of the same input are stacked, as in `dspark.target.weights`."""
    random = seeded(device, 1)
    f32 = {"out_dtype": torch.float32}
    swiglu = {"limit": LIMIT, "act_dtype": torch.bfloat16, **f32}
    ops: list[tuple[str, int, int, int, Callable[..., object], dict[str, Any]]] = [
        ("wqkv_a", ALL, LATENT + 512, HIDDEN, fp8_linear_parts, {"parts": (LATENT, 512)}),
        ("wq_b", ALL - LAYERS["c4"], QUERY, LATENT, fp8_linear, {}),
        ("wq_b with the indexer's", LAYERS["c4"], QUERY + INDEX_QUERY, LATENT, fp8_linear_parts,
         {"parts": (QUERY, INDEX_QUERY)}),
        ("wo_a", ALL, 1024, QUERY, grouped_linear, {}),
        ("wo_b", ALL, HIDDEN, 1024, fp8_linear, {}),
        ("shared w13", ALL, 512, HIDDEN, fp8_linear, f32),
        ("shared swiglu and w2", ALL, HIDDEN, 256, swiglu_linear, swiglu),
    ]  # fmt: skip
    for name, calls, outputs, k, linear, options in ops:
        if linear is grouped_linear:
            activation = {"o": rows_of(rows, k, random).bfloat16().unsqueeze(1)}
        elif linear is swiglu_linear:
            activation = {"gate_up": rows_of(rows, 2 * k, random)}
        else:
            activation = {"x": rows_of(rows, k, random).bfloat16()}
        inputs = [
            {**activation, "w": random_weight(outputs, k, random), **options}
            for _ in range(copies_on(device, outputs * k, 128))
        ]
        yield StepOp(calls, OpCase(name, linear, inputs, outputs * k))


def bf16_ops(rows: int, device: torch.device = CUDA) -> Iterator[StepOp]:
    random = seeded(device, 2)
    for name, parts, calls in [
        ("C4 compressors, index weights", (2048, 512, 64), LAYERS["c4"]),
        ("C128 compressor", (1024,), LAYERS["c128"]),
        ("expert gate", (256,), ALL),
        ("lm_head", (VOCAB_SHARD,), 1),
    ]:
        outputs = sum(parts)
        moved = 2 * outputs * HIDDEN
        shared: dict[str, Any] = {
            "x": rows_of(rows, HIDDEN, random).bfloat16(),
            "out_dtype": torch.float32,
        }
        linear: Callable[..., object] = bf16_linear
        if len(parts) > 1:
            linear = bf16_linear_parts
            shared["parts"] = parts
        inputs = [
            {**shared, "w": prepare_bf16(rows_of(outputs, HIDDEN, random).bfloat16())}
            for _ in range(copies_on(device, moved, 128))
        ]
        yield StepOp(calls, OpCase(name, linear, inputs, moved))


def hyper_ops(rows: int, device: torch.device = CUDA) -> Iterator[StepOp]:
    """Two sites a layer: every site but the last spreads its output and mixes the next input."""
    random = seeded(device, 3)
    norm = torch.ones(HIDDEN, device=device).bfloat16()
    shared = {"numbers": HyperNumbers(EPS, EPS, SINKHORN)}
    scale = torch.rand(3, device=device, generator=random)
    base = torch.randn(24, device=device, generator=random)
    mix = {**shared, "norm_w": norm}
    streams_bytes, fn_bytes = rows * 4 * HIDDEN * 2, 24 * 4 * HIDDEN * 4
    mixed = fn_bytes + streams_bytes
    spread = 2 * streams_bytes + rows * HIDDEN * 2
    mixing: list[dict[str, Any]] = []
    spreading: list[dict[str, Any]] = []
    for _ in range(copies_on(device, fn_bytes)):
        streams = rows_of(rows, 4 * HIDDEN, random).bfloat16().view(rows, 4, HIDDEN)
        fn = prepare_hyper(rows_of(24, 4 * HIDDEN, random) * 0.01)
        mixing.append({**mix, "x": streams, "site": HyperSite(fn, scale, base)})
        pre = mhc_pre(**mixing[-1])
        out = rows_of(rows, HIDDEN, random).bfloat16()
        spreading.append({"f": out, "x": streams, "post": pre.post, "comb": pre.comb})
    both = [one | other for one, other in zip(mixing, spreading, strict=True)]
    yield StepOp(1, OpCase("mhc_pre", mhc_pre, mixing, mixed))
    yield StepOp(2 * ALL - 1, OpCase("mhc_post_pre", mhc_post_pre, both, fn_bytes + spread))
    yield StepOp(1, OpCase("mhc_post", mhc_post, spreading, spread))
    head = prepare_hyper(rows_of(4, 4 * HIDDEN, random) * 0.01)
    collapse = {
        **shared,
        "x": mixing[0]["x"],
        "site": HyperSite(head, scale[:1], base[:4]),
    }
    yield StepOp(1, OpCase("mhc_head", mhc_head, [collapse]))
    for name, calls, width in (("query norm", ALL, LATENT), ("final norm", 1, HIDDEN)):
        x = rows_of(rows, width, random).bfloat16()
        call = {"x": x, "w": norm[:width].clone(), "eps": EPS}
        yield StepOp(calls, OpCase(name, rms_norm, [call]))


def expert_ops(rows: int, device: torch.device = CUDA) -> Iterator[StepOp]:
    random = seeded(device, 4)
    count, topk = moe_inputs.EXPERTS, moe_inputs.TOPK
    choice = {
        "logits": rows_of(rows, count, random),
        "bias": torch.zeros(count, device=device),
        "tid2eid": None,
        "token_ids": torch.zeros(rows, dtype=torch.int64, device=device),
        "k": topk,
        "scale": 1.5,
    }
    yield StepOp(ALL, OpCase("route", route, [choice]))
    shared = {
        "x": rows_of(rows, HIDDEN, random).bfloat16(),
        "experts": moe_inputs.rank_experts(device),
        "limit": LIMIT,
        "shared": rows_of(rows, HIDDEN, random),
    }
    moved = int(moe_inputs.distinct_experts(rows) * moe_inputs.EXPERT_BYTES)
    inputs = [
        {**shared, "route": moe_inputs.random_route(rows, count, topk, random)}
        for _ in range(copies_on(device, moved, 16))
    ]
    yield StepOp(ALL, OpCase("experts", moe_mxfp4, inputs, moved))


# Cases of `kv_ops` -> calls in a step. Compressors are counted as in a step that closes no window.
KV_CALLS = {
    "attention window": LAYERS["window"],
    "attention c4": LAYERS["c4"],
    "attention c128": LAYERS["c128"],
    "q_kv_prepare": ALL,
    "compress c4 pair": LAYERS["c4"],
    "compress c128": LAYERS["c128"],
    "index_q": LAYERS["c4"],
    "index_select": LAYERS["c4"],
}


def cache_ops(rows: int, context: int) -> Iterator[StepOp]:
    for make in kv_ops.MAKERS:
        for case in make(rows, context):
            if case.name in KV_CALLS:
                yield StepOp(KV_CALLS[case.name], case)


PARTS: Mapping[str, Callable[[int, int], Iterator[StepOp]]] = {
    "FP8 linears": lambda rows, _: fp8_ops(rows),
    "bf16 linears": lambda rows, _: bf16_ops(rows),
    "hyper-connections and norms": lambda rows, _: hyper_ops(rows),
    "experts": lambda rows, _: expert_ops(rows),
    "attention, compressors, indexer": cache_ops,
}


def decode_step(bandwidth: float, rows: int = 1, context: int = 8192) -> dict[str, Any]:
    """Microseconds by op and in all; `complete` is False when an op could not be timed."""
    ops, complete = [], True
    for part, make in PARTS.items():
        try:
            for calls, case in make(rows, context):
                us = graph_time(case.launch, len(case.inputs))
                floor = case.moved / bandwidth * 1e6
                ops.append({"part": part, "op": case.name, "calls": calls, "us": us,
                            "step_us": us * calls, "floor_us": floor * calls})  # fmt: skip
        except Exception as error:
            print(f"{part}: {error!r}", flush=True)
            complete = False
    return {
        "rows": rows,
        "context": context,
        "complete": complete,
        "ops": ops,
        "total_us": sum(op["step_us"] for op in ops),
        "floor_us": sum(op["floor_us"] for op in ops),
    }


def print_step(step: Mapping[str, Any]) -> None:
    print(
        f"\nOne decode step of one rank, {counted(step['rows'], 'row')}, context {step['context']}:"
    )
    for op in step["ops"]:
        print(
            f"  {op['op']:30} {op['calls']:3} x {op['us']:7.2f} us = {op['step_us'] / 1e3:6.3f} ms"
            f"   bytes alone {op['floor_us'] / 1e3:6.3f}"
        )
    note = "" if step["complete"] else "  INCOMPLETE"
    print(
        f"  kernels in all {step['total_us'] / 1e3:.2f} ms, bytes alone "
        f"{step['floor_us'] / 1e3:.2f} ms{note}"
    )
