"""Our kernels and those of stock SGLang on the same inputs, in one process on one card.

    python -m dspark.bench.stock_ops [--json FILE] [--only sparse] [--sm89]

Prints median microseconds inside CUDA graphs (prefill: eager, because ours waits for the device
there). The stock ops are what SGLang 0.5.17 runs where the Hopper and Blackwell libraries cannot:
its Triton sparse attention, its torch indexer, its Triton FP8 GEMM, its schedule and its state
clean-up. One that cannot be imported or run is reported as such; the others are still timed.
"""

import argparse
import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from dspark.bench.graph_time import Launch, copies_for, eager_time, graph_time
from dspark.bench.op_case import begin_record, problem_of
from dspark.bench.table import counted
from dspark.bench.tune import moe as moe_inputs
from dspark.bench.tune.attention_inputs import SLOT_BYTES, Inputs, Shape, make
from dspark.bench.tune.fp8_linear import MATRICES, random_weight
from dspark.bench.tune.op import seeded
from dspark.kernels.attention import mla_sparse
from dspark.kernels.common.dispatch import COMPILER_SETTINGS, settle_compiler
from dspark.kernels.common.index_pages import PACKED_STRIDE
from dspark.kernels.indexer import index_q, index_select
from dspark.kernels.linear import act_quant, fp8_linear
from dspark.kernels.moe import moe_mxfp4
from dspark.kernels.schedule import schedule
from dspark.kernels.state import c128_rollback

CUDA = torch.device("cuda")
GAMMA, VERIFY, RING_C128, C128_LAYERS = 5, 6, 136, 20
Timer = Callable[..., float]


class Comparison(NamedTuple):
    op: str
    case: str
    ours: Launch
    stock: Callable[[], Launch] | None  # imports and prepares the stock op; None = there is none
    stock_name: str = ""
    copies: int = 1
    moved: int = 0  # bytes one call must move; 0 = not given
    eager: bool = False


def schedules() -> Iterator[Comparison]:
    for requests in (1, 8, 64):
        confidence = torch.rand(requests, GAMMA, device=CUDA, generator=seeded(CUDA, requests))
        for label, budget in (("none", 0), ("part", 2 * requests), ("full", GAMMA * requests)):
            admit = torch.tensor([budget], dtype=torch.int32, device=CUDA)
            yield Comparison(
                "verify schedule",
                f"{counted(requests, 'request')}, {label}",
                lambda _, c=confidence, a=admit: schedule(c, a),
                partial(_stock_schedule, confidence, budget),
                "three Triton launches",
            )


def _stock_schedule(confidence: torch.Tensor, budget: int) -> Launch:
    from sglang.kernels.ops.speculative.dspark.dspark_schedule import (
        schedule_verify_lens_topk_triton,
    )

    config = SimpleNamespace(
        resolved_max_verify_len=lambda: VERIFY, survival_eps=1e-6, min_verify_len=1
    )
    return lambda _: schedule_verify_lens_topk_triton(
        confidence=confidence, budget=budget, cfg=config
    )


def sparse_decode() -> Iterator[Comparison]:
    for rows in (1, 6, 8, 48):
        moved = rows * (128 + 512) * SLOT_BYTES
        copies = copies_for(moved)
        inputs = make(Shape(rows, 8, 128, 512, 512), CUDA, copies, seed=rows)
        yield Comparison(
            "sparse attention",
            counted(rows, "row"),
            lambda i, p=inputs: mla_sparse(*p.arguments(i)),
            partial(_stock_sparse, inputs),
            "SM120 Triton fallback",
            copies,
            moved,
        )


def sparse_prefill() -> Iterator[Comparison]:
    for rows in (128, 1024):
        inputs = make(Shape(rows, 8, 128, 512, 64), CUDA, 1, seed=rows)
        yield Comparison(
            "sparse attention, prefill",
            f"{rows} rows, eager",
            lambda _, p=inputs: mla_sparse(*p.arguments(0)),
            partial(_stock_sparse, inputs),
            "SM120 Triton fallback, which it also uses in prefill",
            eager=True,
        )


def _stock_sparse(inputs: Inputs) -> Launch:
    from sglang.kernels.ops.attention.flash_mla_sm120_triton import flash_mla_sparse_decode_triton

    def paged(pool: torch.Tensor, per_page: int) -> torch.Tensor:
        size = (pool.shape[0], per_page, 1, SLOT_BYTES)
        return pool.as_strided(size, (pool.stride(0), SLOT_BYTES, SLOT_BYTES, 1))

    window, c4 = paged(inputs.window_pool, 256), paged(inputs.c4_pool, 64)
    return lambda i: flash_mla_sparse_decode_triton(
        inputs.q[i].unsqueeze(1), window, inputs.window_idx[i].unsqueeze(1), inputs.window_len,
        inputs.sink, 512, 512**-0.5, c4, inputs.c4_idx[i].unsqueeze(1), inputs.c4_len,
    )  # fmt: skip


def indexers() -> Iterator[Comparison]:
    """Scores and top 512 of one layer; one request a row."""
    for rows, context in ((1, 8192), (8, 8192), (48, 8192), (1, 65536)):
        entries = context // 4
        pages = entries // 64
        random = seeded(CUDA, rows)
        pool = torch.zeros(rows * pages, PACKED_STRIDE, dtype=torch.uint8, device=CUDA)
        keys = torch.randn(rows * pages, 64 * 128, device=CUDA, generator=random)
        pool[:, : 64 * 128] = keys.to(torch.float8_e4m3fn).view(torch.uint8)
        pool.view(torch.float32)[:, 64 * 32 :] = 1.0
        table = torch.randperm(rows * pages, device=CUDA).int().view(rows, pages)
        q = torch.randn(rows, 64, 128, device=CUDA, generator=random).bfloat16()
        weight = torch.rand(rows, 64, device=CUDA, generator=random)
        pos = torch.full((rows,), 100, device=CUDA)
        query = index_q(q, weight, torch.randn(256, 64, device=CUDA), pos)
        owner = torch.arange(rows, device=CUDA).int()
        length = torch.full((rows,), entries, dtype=torch.int32, device=CUDA)
        yield Comparison(
            "index scores and top 512",
            f"{counted(rows, 'row')}, context {context}",
            partial(_our_index, query, pool, table, owner, length, entries),
            partial(_stock_index, query, pool, table, length, entries),
            "torch fallback",
            moved=rows * entries * 132,
        )


def _our_index(query, pool, table, owner, length, entries: int, _: int) -> object:
    return index_select(query, pool, table, owner, length, entries, 512)


def _stock_index(query, pool, table, length, entries: int) -> Launch:
    from sglang.srt.layers.attention.dsv4.indexer import (
        fp8_paged_mqa_logits_torch_sm120,
        topk_transform_512_pytorch_vectorized,
    )

    keys = pool.view(-1, 64, 1, 132)
    chosen = torch.empty(table.shape[0], 512, dtype=torch.int32, device=CUDA)

    def launch(_: int) -> object:
        scores = fp8_paged_mqa_logits_torch_sm120(
            query.q.unsqueeze(1), keys, query.weight, length, table, None, entries, False
        )
        return topk_transform_512_pytorch_vectorized(scores, length, table, chosen, 64)

    return launch


def linears() -> Iterator[Comparison]:
    for name in ("wqkv_a", "wq_b"):
        outputs, k = MATRICES[name]
        for rows in (1, 6, 48):
            random = seeded(CUDA, rows)
            copies = copies_for(outputs * k)
            weights = [random_weight(outputs, k, random) for _ in range(copies)]
            x = torch.randn(rows, k, device=CUDA, generator=random).bfloat16()
            yield Comparison(
                "FP8 linear",
                f"{name} {outputs}x{k}, {counted(rows, 'row')}",
                lambda i, x=x, w=weights: fp8_linear(x, w[i]),
                partial(_stock_linear, x, weights),
                "w8a8_block_fp8 Triton GEMM, activation quantised beforehand",
                copies,
                outputs * k,
            )


def _stock_linear(x: torch.Tensor, weights: list) -> Launch:
    from sglang.kernels.ops.quantization.fp8_kernel import w8a8_block_fp8_matmul_triton

    codes, scales = act_quant(x)
    return lambda i: w8a8_block_fp8_matmul_triton(
        codes, weights[i].codes, scales, weights[i].scales, [128, 128], torch.bfloat16
    )


def cleanups() -> Iterator[Comparison]:
    """State rows of rejected drafts, all 20 C128 layers; nothing was accepted."""
    for requests in (1, 8):
        state = torch.zeros(C128_LAYERS, (requests + 1) * RING_C128, 1024, device=CUDA)
        slot = torch.arange(1, requests + 1, device=CUDA)
        length = torch.arange(requests, device=CUDA) * 100
        commit = torch.ones(requests, dtype=torch.int32, device=CUDA)
        verify = torch.full((requests,), VERIFY, dtype=torch.int32, device=CUDA)
        yield Comparison(
            "C128 rollback of 20 layers",
            counted(requests, "request"),
            partial(_our_cleanup, state, slot, length, commit, verify),
            partial(_stock_cleanup, state, slot, length, commit),
            "one Triton launch a layer",
        )


def _our_cleanup(state, slot, length, commit, verify, _: int) -> None:
    c128_rollback(state, slot, length, commit, verify, ring=RING_C128, verify_width=VERIFY)


def _stock_cleanup(state, slot, length, commit) -> Launch:
    from sglang.kernels.ops.attention.dsv4.c128_cleanup import clear_unaccepted_c128_draft_states

    def launch(_: int) -> None:
        for layer in state:
            clear_unaccepted_c128_draft_states(
                layer, slot, length, commit, ring_size=RING_C128, num_draft_tokens=VERIFY
            )

    return launch


def experts() -> Iterator[Comparison]:
    """MXFP4 experts of one rank; bytes are those of the distinct experts the routes hit."""
    weights = moe_inputs.rank_experts(CUDA)
    for rows in range(1, 9):
        random = seeded(CUDA, rows)
        copies = copies_for(6 * rows * moe_inputs.EXPERT_BYTES, 16)
        x = torch.randn(rows, moe_inputs.HIDDEN, device=CUDA, generator=random).bfloat16()
        routes = [moe_inputs.random_route(rows, 256, 6, random) for _ in range(copies)]
        hit = sum(route.experts.unique().numel() for route in routes) / copies
        yield Comparison(
            "MXFP4 experts",
            f"{counted(rows, 'row')}, {hit:.0f} experts",
            lambda i, x=x, r=routes: moe_mxfp4(x, weights, r[i], moe_inputs.LIMIT, None),
            None,
            copies=copies,
            moved=int(hit * moe_inputs.EXPERT_BYTES),
        )


GROUPS: dict[str, Callable[[], Iterator[Comparison]]] = {
    "schedule": schedules,
    "sparse": sparse_decode,
    "prefill": sparse_prefill,
    "indexer": indexers,
    "linear": linears,
    "cleanup": cleanups,
    "experts": experts,
}


def guarded(measure: Callable[[], float]) -> tuple[float | None, str | None]:
    """(microseconds, None) or (None, why not)."""
    try:
        return measure(), None
    except Exception as error:
        return None, problem_of(error)


@contextmanager
def triton_as_it_comes() -> Iterator[None]:
    """Stock kernels are compiled as where we are not installed: contracted, and with wgmma."""
    settle_compiler()
    ours = {name: os.environ.pop(name) for name in COMPILER_SETTINGS}
    try:
        yield
    finally:
        os.environ.update(ours)


def compare(comparison: Comparison, bandwidth: float) -> dict[str, Any]:
    timer: Timer = eager_time if comparison.eager else partial(graph_time, copies=comparison.copies)
    ours, problem = guarded(lambda: timer(comparison.ours))
    stock = stock_problem = None
    prepare = comparison.stock
    if prepare is not None:
        with triton_as_it_comes():
            stock, stock_problem = guarded(lambda: timer(prepare()))
    floor = comparison.moved / bandwidth * 1e6
    return {
        "op": comparison.op,
        "case": comparison.case,
        "us": ours,
        "stock_us": stock,
        "stock": comparison.stock_name or None,
        "problem": problem,
        "stock_problem": stock_problem,
        "bytes": comparison.moved or None,
        "share_of_copy_bandwidth": floor / ours if ours and comparison.moved else None,
    }


def line_of(figure: dict[str, Any]) -> str:
    def us(value: float | None) -> str:
        return "      -" if value is None else f"{value:7.1f}"

    line = f"{figure['op']:28} {figure['case']:32} {us(figure['us'])} us"
    if figure["stock"]:
        line += f"  stock {us(figure['stock_us'])}"
    if figure["us"] and figure["stock_us"]:
        line += f"  {figure['stock_us'] / figure['us']:6.2f}x"
    if figure["share_of_copy_bandwidth"]:
        line += f"  {figure['share_of_copy_bandwidth']:.0%} of copy bandwidth"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dspark.bench.stock_ops", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", choices=[*GROUPS, "step"], nargs="+", help="groups to run")
    parser.add_argument("--sm89", action="store_true", help="Ada code generation on a Hopper card")
    options = parser.parse_args()
    record = begin_record("stock_ops", options.sm89)
    bandwidth = record["copy_bandwidth"]
    for name, group in GROUPS.items():
        if options.only and name not in options.only:
            continue
        try:
            for comparison in group():
                record["figures"].append(compare(comparison, bandwidth))
                print(line_of(record["figures"][-1]), flush=True)
        except Exception:
            print(f"{name}: could not be prepared", flush=True)
            traceback.print_exc()
        if options.json:  # what was measured survives a later crash
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    if not options.only or "step" in options.only:
        from dspark.bench.step_ops import decode_step, print_step

        record["step"] = decode_step(bandwidth)
        print_step(record["step"])
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
