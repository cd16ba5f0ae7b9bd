"""What one decode step of one rank (of eight) costs in kernels: every op, timed alone, added up.

43 layers: 2 with a window only, 21 C4, 20 C128. Collectives, launch gaps and the host are not in
it, so a real step takes longer; ops that overlap or share caches could make it shorter.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from dspark.bench import kv_ops
from dspark.bench.graph_time import Launch, copies_for, graph_time
from dspark.bench.table import counted
from dspark.bench.tune import moe as moe_inputs
from dspark.bench.tune.fp8_linear import random_weight
from dspark.bench.tune.op import seeded
from dspark.kernels.hyper import mhc_head, mhc_post, mhc_post_pre, mhc_pre, prepare_hyper
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
HIDDEN, LATENT, EPS, LIMIT = 4096, 1024, 1e-6, 10.0
QUERY, INDEX_QUERY = 8 * 512, 64 * 128
LAYERS = {"window": 2, "c4": 21, "c128": 20}
ALL = sum(LAYERS.values())
VOCAB_SHARD = 16_160


class StepOp(NamedTuple):
    name: str
    calls: int  # in a step
    launch: Launch
    copies: int = 1
    moved: int = 0  # bytes of weights a call reads


def rows_of(rows: int, columns: int, random: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, device=CUDA, generator=random)


def fp8_ops(rows: int) -> Iterator[StepOp]:
    """Matrices of the same input are stacked, as in `dspark.target.weights`."""
    random = seeded(CUDA, 1)
    swiglu = partial(swiglu_linear, limit=LIMIT, act_dtype=torch.bfloat16, out_dtype=torch.float32)
    ops: list[tuple[str, int, int, int, Callable[..., object]]] = [
        ("wqkv_a", LATENT + 512, HIDDEN, ALL, partial(fp8_linear_parts, parts=(LATENT, 512))),
        ("wq_b", QUERY, LATENT, ALL - LAYERS["c4"], fp8_linear),
        ("wq_b with the indexer's", QUERY + INDEX_QUERY, LATENT, LAYERS["c4"],
         partial(fp8_linear_parts, parts=(QUERY, INDEX_QUERY))),
        ("wo_a", 1024, QUERY, ALL, grouped_linear),
        ("wo_b", HIDDEN, 1024, ALL, fp8_linear),
        ("shared w13", 512, HIDDEN, ALL, partial(fp8_linear, out_dtype=torch.float32)),
        ("shared swiglu and w2", HIDDEN, 256, ALL, swiglu),
    ]  # fmt: skip
    for name, outputs, k, calls, linear in ops:
        copies = copies_for(outputs * k, 32)
        weights = [random_weight(outputs, k, random) for _ in range(copies)]
        x = rows_of(rows, k, random).bfloat16()
        if linear is grouped_linear:
            x = x.unsqueeze(1)
        elif linear is swiglu:
            x = rows_of(rows, 2 * k, random)
        yield StepOp(
            name, calls, lambda i, f=linear, x=x, w=weights: f(x, w[i]), copies, outputs * k
        )


def bf16_ops(rows: int) -> Iterator[StepOp]:
    random = seeded(CUDA, 2)
    for name, parts, calls in [
        ("C4 compressors, index weights", (2048, 512, 64), LAYERS["c4"]),
        ("C128 compressor", (1024,), LAYERS["c128"]),
        ("expert gate", (256,), ALL),
        ("lm_head", (VOCAB_SHARD,), 1),
    ]:
        moved = 2 * sum(parts) * HIDDEN
        copies = copies_for(moved, 32)
        weights = [
            prepare_bf16(rows_of(sum(parts), HIDDEN, random).bfloat16()) for _ in range(copies)
        ]
        x = rows_of(rows, HIDDEN, random).bfloat16()

        def launch(i: int, parts=parts, w=weights, x=x) -> object:
            if len(parts) == 1:
                return bf16_linear(x, w[i], torch.float32)
            return bf16_linear_parts(x, w[i], parts, torch.float32)

        yield StepOp(name, calls, launch, copies, moved)


def hyper_ops(rows: int) -> Iterator[StepOp]:
    """Two sites a layer: every site but the last spreads its output and mixes the next input."""
    random = seeded(CUDA, 3)
    streams = torch.randn(rows, 4, HIDDEN, device=CUDA, generator=random).bfloat16()
    site = prepare_hyper(rows_of(24, 4 * HIDDEN, random) * 0.01)
    head = prepare_hyper(rows_of(4, 4 * HIDDEN, random) * 0.01)
    scale, base = torch.rand(3, device=CUDA), torch.randn(24, device=CUDA)
    norm = torch.ones(HIDDEN, device=CUDA).bfloat16()
    mixing: tuple[Any, ...] = (site, scale, base, norm, EPS, EPS, 20)
    pre = mhc_pre(streams, *mixing)
    out = rows_of(rows, HIDDEN, random).bfloat16()
    spreading = (out, streams, pre.post, pre.comb)
    latent, latent_norm = out[:, :LATENT].contiguous(), norm[:LATENT].contiguous()
    moved = site.fn.nbytes
    yield StepOp("mhc_pre", 1, lambda _: mhc_pre(streams, *mixing), moved=moved)
    yield StepOp(
        "mhc_post_pre", 2 * ALL - 1, lambda _: mhc_post_pre(*spreading, *mixing), moved=moved
    )
    yield StepOp("mhc_post", 1, lambda _: mhc_post(*spreading))
    yield StepOp("mhc_head", 1, lambda _: mhc_head(streams, head, scale[:1], base[:4], EPS, EPS))
    yield StepOp("query norm", ALL, lambda _: rms_norm(latent, latent_norm, EPS))
    yield StepOp("final norm", 1, lambda _: rms_norm(out, norm, EPS))


def expert_ops(rows: int) -> Iterator[StepOp]:
    random = seeded(CUDA, 4)
    experts = moe_inputs.rank_experts(CUDA)
    x, shared = rows_of(rows, HIDDEN, random).bfloat16(), rows_of(rows, HIDDEN, random)
    routes = [moe_inputs.random_route(rows, 256, 6, random) for _ in range(16)]
    logits, bias = rows_of(rows, 256, random), torch.zeros(256, device=CUDA)
    tokens = torch.zeros(rows, dtype=torch.int64, device=CUDA)
    yield StepOp("route", ALL, lambda _: route(logits, bias, None, tokens, 6, 1.5))
    yield StepOp(
        "experts",
        ALL,
        lambda i: moe_mxfp4(x, experts, routes[i], LIMIT, shared),
        16,
        int(moe_inputs.distinct_experts(rows) * moe_inputs.EXPERT_BYTES),
    )


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
                calls = KV_CALLS[case.name]
                yield StepOp(case.name, calls, case.launch, len(case.inputs), case.moved)


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
            for op in make(rows, context):
                us = graph_time(op.launch, op.copies)
                floor = op.moved / bandwidth * 1e6
                ops.append({"part": part, "op": op.name, "calls": op.calls, "us": us,
                            "step_us": us * op.calls, "floor_us": floor * op.calls})  # fmt: skip
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
