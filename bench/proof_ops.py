"""What each GPU op promises, checked and timed at the shapes of one rank of eight.

    python -m dspark.bench.proof_ops [--json FILE] [--sm89] [--only linear experts]

For every op and number of rows: the largest error against the fp64 reference (on the CPU, for
experts on the card), whether 50 calls give the same bits, whether a row alone has the bits that it
has in its batch, and the median microseconds inside a CUDA graph with inputs rotated through
copies. Exit status 1 when a promise is broken or an op could not run.

The reference computes in fp64 from the op's own inputs. Its result is not rounded where the op
rounds nothing but its result; elsewhere it rounds where the served arithmetic does.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark.bench import control_ops, kv_ops, step_ops
from dspark.bench.graph_time import Launch, graph_time
from dspark.bench.op_case import OpCase, begin_record, problem_of
from dspark.bench.table import accuracy, counted, number
from dspark.bench.tune import moe as moe_inputs
from dspark.kernels.accept import accept_greedy, accept_sampled
from dspark.kernels.attention import SlotList, mla_sparse
from dspark.kernels.common.index_pages import KEYS, WIDTH
from dspark.kernels.common.kv_pages import DATA_BYTES, NOPE, SCALE_BYTES
from dspark.kernels.compress import CompressRows, Stream, c4_compress_pair, c128_compress
from dspark.kernels.draft import confidence, markov_block
from dspark.kernels.hyper import mhc_head, mhc_post, mhc_post_pre, mhc_pre
from dspark.kernels.indexer import index_logits, index_q, index_select, index_topk
from dspark.kernels.linear import (
    bf16_linear,
    bf16_linear_parts,
    fp8_linear,
    fp8_linear_parts,
    grouped_linear,
    rms_norm,
    swiglu_linear,
)
from dspark.kernels.moe import ExpertWeights, moe_mxfp4, route
from dspark.kernels.moe import reference as moe_reference
from dspark.kernels.qkv import q_kv_prepare
from dspark.kernels.sampling import choose, cut_tails
from dspark.kernels.schedule import schedule
from dspark.kernels.state import c128_rollback
from dspark.kernels.step import draft_meta, step_meta
from dspark.target.caches import C4_PER_PAGE

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
CONTEXT = 8192  # tokens before the rows
RUNS = 50
TOLERANCE = 1.5e-2  # of the largest absolute value: what the kernels promise of float results
FP8_TOLERANCE = 1e-3  # share of stored codes that a border between two codes may move by one step
Outputs = Any  # a tensor, or tuples of tensors and other tuples


class Proof(NamedTuple):
    """One op on one set of inputs."""

    op: str
    inputs: str
    size: int  # rows or requests, as `unit` says
    unit: str
    launch: Launch  # what is timed, on a copy of the inputs
    run: Callable[[], Outputs]  # the same call on the first copy; leaves the inputs as they are
    reference: Callable[[], Outputs]
    alone: Callable[[], Outputs] | None  # as `run`, every row in a call of its own
    copies: int = 1
    moved: int = 0  # bytes a call must move; 0 = not given


class Method(NamedTuple):
    """How the calls of one op are proven."""

    rows: Mapping[str, int] = {}  # arguments with rows -> entries of the first axis a row has
    wide: str | None = None  # argument whose type the result has: fp64 for the reference
    run: Callable[..., Outputs] | None = None  # instead of the op: returns what it writes in place
    by_row: Callable[..., Outputs] | None = None  # where a row reads what the row before wrote
    reference: Callable[..., Outputs] | None = None  # gets the inputs where they are


def each_tensor(function: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with every tensor in it, also inside tuples and dicts, replaced by its image."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        parts = [each_tensor(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, dict):
        return {name: each_tensor(function, part) for name, part in value.items()}
    return value


def tensors(outputs: Outputs) -> list[Tensor]:
    """All of them, in a fixed order."""
    found: list[Tensor] = []
    each_tensor(found.append, outputs)
    return found


def bits(x: Tensor) -> Tensor:
    """[..., N] as the bytes of each row, u8 [..., N * item size]: NaN then equals itself."""
    return x.contiguous().view(torch.uint8)


def same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))


class Agreement(NamedTuple):
    error: float | None  # largest error of float outputs, of their largest absolute value
    differing: int  # integers and fp8 codes that are not equal to the reference's
    compared: int  # integers and fp8 codes
    right: bool


def agreement(got: Sequence[Tensor], want: Sequence[Tensor]) -> Agreement:
    """Of an op's outputs with the reference's, whose floats may be wider. On any device."""
    errors, differing, compared, right = [], 0, 0, True
    for a, b in zip(got, want, strict=True):
        a, b = a.cpu(), b.cpu()
        if a.shape != b.shape:
            raise ValueError(f"the op returns {list(a.shape)}, the reference {list(b.shape)}")
        is_code = a.dtype == torch.float8_e4m3fn
        if a.is_floating_point() and not is_code:
            errors.append(0.0 if same_bits([a], [b]) else largest_error(a.double(), b.double()))
            continue
        steps = code_steps(a, b) if is_code else (a != b).int()
        unequal = int((steps > 0).sum())
        differing += unequal
        compared += a.numel()
        # + 2: a border or two among few codes
        allowed = FP8_TOLERANCE * a.numel() + 2 if is_code else 0
        right &= unequal <= allowed and not bool((steps > 1).any())
    error = max(errors, default=None)
    return Agreement(error, differing, compared, right and (error is None or error <= TOLERANCE))


def largest_error(got: Tensor, want: Tensor) -> float:
    """Of the largest finite value wanted; infinite when a NaN or an infinity is misplaced."""
    finite = want.isfinite()
    if not torch.equal(got[~finite], want[~finite]) or not bool(got[finite].isfinite().all()):
        return torch.inf
    if not bool(finite.any()):
        return 0.0
    largest = want[finite].abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float((got[finite] - want[finite]).abs().max() / largest)


def code_steps(got: Tensor, want: Tensor) -> Tensor:
    """Distance of e4m3 values in representable steps (their codes are sign and magnitude)."""
    codes = (part.contiguous().view(torch.uint8).int() for part in (got, want))
    low, high = (torch.where(code < 128, code, 128 - code) for code in codes)
    return (low - high).abs()


def kv_slots(pool: Tensor, per_page: int, slot: Tensor) -> tuple[Tensor, ...]:
    """Codes, rotated part and scale exponents of slots slot >= 0 of a packed pool."""
    slot = slot[slot >= 0].long()[:, None]
    page, offset = slot // per_page, slot % per_page

    def bytes_of(start: Tensor | int, width: int) -> Tensor:
        return pool[page, start + offset * width + torch.arange(width, device=pool.device)]

    data, scales = bytes_of(0, DATA_BYTES), bytes_of(per_page * DATA_BYTES, SCALE_BYTES)
    rope = data[:, NOPE:].contiguous().view(torch.bfloat16)
    return data[:, :NOPE].contiguous().view(torch.float8_e4m3fn), rope, scales


def index_slots(pool: Tensor, slot: Tensor) -> tuple[Tensor, ...]:
    """Codes and scales of keys slot >= 0 of a packed index pool."""
    slot = slot[slot >= 0].long()
    page, offset = slot // KEYS, slot % KEYS
    column = offset[:, None] * WIDTH + torch.arange(WIDTH, device=pool.device)
    scales = pool.view(torch.float32)[page, KEYS * WIDTH // 4 + offset]
    return pool[page[:, None], column].view(torch.float8_e4m3fn), scales


# Ops that write in place, made to return what they wrote.


def run_prepare(*, slot: Tensor, pool: Tensor, slots_per_page: int, **rest: Any) -> Outputs:
    pool = pool.clone()
    q = q_kv_prepare(slot=slot, pool=pool, slots_per_page=slots_per_page, **rest)
    return q, kv_slots(pool, slots_per_page, slot)


def rows_of(value: Any, start: int, stop: int) -> Any:
    """Entries start..stop of every tensor's first axis.

    Of a slot list only the list, not the pool. Copies, because a slice would lose the alignment
    that kernels are compiled for.
    """
    if isinstance(value, SlotList):
        idx, length = rows_of((value.idx, value.length), start, stop)
        return value._replace(idx=idx, length=length)
    return each_tensor(lambda x: x[start:stop].clone(), value)


def forwards(rows: CompressRows, s: Any, by_row: bool) -> Iterator[tuple[CompressRows, Any]]:
    """Rows of a compressor call with their raw rows, at once or as forwards of one row each."""
    if not by_row:
        yield rows, s
        return
    for t in range(len(rows.plan)):
        row, own = rows_of((rows, s), t, t + 1)
        row.plan[:, 3] = 0  # the first row of its request in this forward
        yield row, own


def run_pair(
    main: Stream, index: Stream, rows: CompressRows, cos_sin: Tensor, *, running: bool,
    by_row: bool = False,
) -> Outputs:  # fmt: skip
    main, index = (
        part._replace(state=part.state.clone(), pool=part.pool.clone()) for part in (main, index)
    )
    for step, (one, other) in forwards(rows, (main.s, index.s), by_row):
        c4_compress_pair(
            main._replace(s=one), index._replace(s=other), step, cos_sin, running=running
        )
    entries = kv_slots(main.pool, C4_PER_PAGE, rows.entry), index_slots(index.pool, rows.entry)
    return main.state, index.state, entries


def run_c128(
    stream: Stream, rows: CompressRows, cos_sin: Tensor, *, entries_per_page: int,
    by_row: bool = False,
) -> Outputs:  # fmt: skip
    stream = stream._replace(state=stream.state.clone(), pool=stream.pool.clone())
    for step, one in forwards(rows, stream.s, by_row):
        c128_compress(stream._replace(s=one), step, cos_sin, entries_per_page)
    return stream.state, kv_slots(stream.pool, entries_per_page, rows.entry)


def run_rollback(pool: Tensor, **rest: Any) -> Outputs:
    pool = pool.clone()
    c128_rollback(pool, **rest)
    return pool


def choice_by_reference(k: int, **index: Any) -> Outputs:
    """The reference's choice among the op's own scores, which `index_logits` proves apart."""
    scores = index_logits(**index)
    lists = {name: index[name].cpu() for name in ("c4_len", "page_table", "row_req")}
    return index_topk(scores.cpu(), k=k, **lists)


def experts_by_reference(x: Tensor, experts: ExpertWeights, **rest: Any) -> Outputs:
    """From the bytes that were packed for the op, and on the card: decoding the experts of 48 rows
    takes the CPU ten seconds."""
    w13, s13, w2, s2 = moe_inputs.random_bytes(
        x.device, moe_inputs.EXPERTS, moe_inputs.HIDDEN, moe_inputs.WIDTH
    )
    packed = ExpertWeights(w13, s13, w2, s2, None, None)
    return moe_reference.moe_mxfp4(x, packed, **rest)


def each(*names: str) -> dict[str, int]:
    """Arguments with one entry a row."""
    return dict.fromkeys(names, 1)


SAMPLING = each("temperature", "seed", "committed")
CANDIDATES = {**each("candidates", "acceptable", "committed"), "logits": control_ops.V}
METHODS: dict[Callable[..., Any], Method] = {
    fp8_linear: Method(each("x"), "x"),
    fp8_linear_parts: Method(each("x"), "x"),
    bf16_linear: Method(each("x")),
    bf16_linear_parts: Method(each("x")),
    swiglu_linear: Method(each("gate_up")),
    grouped_linear: Method(each("o"), "o"),
    rms_norm: Method(each("x"), "x"),
    mhc_pre: Method(each("x")),
    mhc_post: Method(each("f", "x", "post", "comb"), "x"),
    mhc_post_pre: Method(each("f", "x", "post", "comb")),
    mhc_head: Method(each("x"), "x"),
    route: Method(each("logits", "token_ids")),
    moe_mxfp4: Method(each("x", "route", "shared"), reference=experts_by_reference),
    mla_sparse: Method(each("q", "window", "compressed", "pos"), "q"),
    q_kv_prepare: Method(each("q", "kv", "pos", "slot"), run=run_prepare),
    c4_compress_pair: Method(run=run_pair, by_row=partial(run_pair, by_row=True)),
    c128_compress: Method(run=run_c128, by_row=partial(run_c128, by_row=True)),
    index_q: Method(each("q", "w", "pos")),
    index_logits: Method(each("query", "row_req", "c4_len")),
    index_select: Method(each("query", "row_req", "c4_len"), reference=choice_by_reference),
    schedule: Method(),  # requests compete for one budget
    step_meta: Method(run=lambda out, **rest: step_meta(**rest)),
    draft_meta: Method(run=lambda out, **rest: draft_meta(**rest)),
    markov_block: Method(each("base", "prev", "sampling")),
    confidence: Method(each("hidden", "prev_tokens")),
    accept_greedy: Method(CANDIDATES),
    accept_sampled: Method({**CANDIDATES, **SAMPLING, **each("draft_logits")}),
    cut_tails: Method({**each("temperature", "top_k", "top_p", "min_p"), "logits": control_ops.V}),
    choose: Method({**each("temperature", "seed", "position"), "logits": control_ops.V}),
    c128_rollback: Method(run=run_rollback),
}


def proof_of(case: OpCase, size: int, unit: str) -> Proof:
    """The proof of one case, whose inputs have `size` rows or requests."""
    method = METHODS[case.function]
    inputs = case.inputs[0]
    run = method.run or case.function

    def reference() -> Outputs:
        if method.reference is not None:
            return method.reference(**inputs)
        on_cpu = each_tensor(Tensor.cpu, inputs)
        if "out_dtype" in on_cpu:
            on_cpu["out_dtype"] = torch.float64
        elif method.wide is not None:
            on_cpu[method.wide] = on_cpu[method.wide].double()
        return run(**on_cpu)

    def row_after_row() -> Outputs:
        parts = []
        for r in range(size):
            row = {
                name: rows_of(inputs[name], r * entries, (r + 1) * entries)
                for name, entries in method.rows.items()
                if name in inputs
            }
            parts.append(map(bits, tensors(run(**{**inputs, **row}))))
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    alone: Callable[[], Outputs] | None = row_after_row if method.rows else None
    if method.by_row is not None:
        alone = partial(method.by_row, **inputs)
    return Proof(
        case.function.__name__, case.name, size, unit, case.launch,
        lambda: run(**inputs), reference, alone, len(case.inputs), case.moved,
    )  # fmt: skip


# A maker of OpCases takes a number of rows or requests and a device.


def of_step(make: Callable[..., Iterator[step_ops.StepOp]]) -> Callable[..., Iterator[OpCase]]:
    return lambda rows, device: (op.case for op in make(rows, device))


def of_rows(make: Callable[..., Iterator[OpCase]]) -> Callable[..., Iterator[OpCase]]:
    return lambda rows, device: make(rows, CONTEXT, device)


class Family(NamedTuple):
    make: Callable[[int, torch.device], Iterator[OpCase]]  # of so many rows or requests
    sizes: Sequence[int] = (1, 6, 48)
    unit: str = "row"


FAMILIES = {
    "fp8": Family(of_step(step_ops.fp8_ops)),
    "bf16": Family(of_step(step_ops.bf16_ops)),
    "hyper": Family(of_step(step_ops.hyper_ops)),
    "experts": Family(of_step(step_ops.expert_ops)),
    "attention": Family(of_rows(kv_ops.attention_cases)),
    "prepare": Family(of_rows(kv_ops.prepare_cases)),
    "compress": Family(of_rows(kv_ops.compress_cases)),
    "index": Family(of_rows(kv_ops.index_cases)),
    "metadata": Family(of_rows(control_ops.metadata_cases), (1, 8), "request"),
    "schedule": Family(control_ops.schedule_cases, (1, 8), "request"),
    "draft": Family(control_ops.draft_cases, (1, 8), "request"),
    "accept": Family(control_ops.accept_cases, (1, 8), "request"),
    "sampling": Family(control_ops.sampling_cases, (1, 8), "request"),
    "rollback": Family(control_ops.rollback_cases, (1, 8), "request"),
}


def blank(op: str, inputs: str, size: int, unit: str) -> dict[str, Any]:
    """The figures of one proof before anything is known."""
    return {
        "op": op, "inputs": inputs, "size": size, "unit": unit, "holds": False, "problem": None,
        **dict.fromkeys(Agreement._fields), "deterministic": None, "invariant": None, "us": None,
        "bytes": None, "gb_per_s": None, "share_of_copy_bandwidth": None,
    }  # fmt: skip


def prove(proof: Proof, bandwidth: float | None = None) -> dict[str, Any]:
    """All figures of one op, JSON-ready; what an exception prevented is None.

    bandwidth: bytes/s of a copy; None = do not time.
    """
    figure = blank(proof.op, proof.inputs, proof.size, proof.unit)
    try:
        first = tensors(proof.run())
        figure |= agreement(first, tensors(proof.reference()))._asdict()
        again = (tensors(proof.run()) for _ in range(RUNS - 1))
        figure["deterministic"] = all(same_bits(first, outputs) for outputs in again)
        if proof.alone is not None:
            figure["invariant"] = same_bits(first, tensors(proof.alone()))
        figure["holds"] = (
            figure["right"] and figure["deterministic"] and figure["invariant"] is not False
        )
        if bandwidth is not None:
            us = graph_time(proof.launch, proof.copies)
            figure["us"] = us
            if proof.moved:
                figure["bytes"] = proof.moved
                figure["gb_per_s"] = proof.moved / us / 1e3
                figure["share_of_copy_bandwidth"] = proof.moved / bandwidth * 1e6 / us
    except Exception as error:
        figure |= {"problem": problem_of(error), "holds": False}
    return figure


def line_of(figure: Mapping[str, Any]) -> str:
    if figure["problem"]:
        result = figure["problem"]
    else:
        invariant = {True: "yes", False: "NO", None: "-"}[figure["invariant"]]
        result = (
            f"{'right' if figure['right'] else 'WRONG':5} {accuracy([figure]):24}"
            f" deterministic {'yes' if figure['deterministic'] else 'NO':3}"
            f" invariant {invariant:3} {number(figure['us']):>7} us"
            f" {number(figure['gb_per_s'], 0):>5} GB/s"
            f" {number(figure['share_of_copy_bandwidth'], 0, 100):>3} %"
        )
    size = counted(figure["size"], figure["unit"])
    return f"{figure['op']:18} {figure['inputs']:34} {size:10} {result}"


def run_family(name: str, device: torch.device, bandwidth: float | None) -> list[dict[str, Any]]:
    """Figures of one family, each printed. Inputs that cannot be made are a figure of their own."""
    family = FAMILIES[name]
    figures: list[dict[str, Any]] = []

    def add(figure: dict[str, Any]) -> None:
        figures.append(figure)
        print(line_of(figure), flush=True)

    for size in family.sizes:
        try:
            for case in family.make(size, device):
                add(prove(proof_of(case, size, family.unit), bandwidth))
        except Exception as error:
            unmade = blank(name, "inputs that could not be made", size, family.unit)
            add(unmade | {"problem": problem_of(error)})
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dspark.bench.proof_ops", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", choices=FAMILIES, nargs="+", help="families to run")
    parser.add_argument("--sm89", action="store_true", help="Ada code generation on a Hopper card")
    options = parser.parse_args()
    start = time.monotonic()
    record = begin_record("proof_ops", options.sm89)
    record |= {"context": CONTEXT, "runs": RUNS, "tolerance": TOLERANCE}
    for name in options.only or FAMILIES:
        record["figures"] += run_family(name, CUDA, record["copy_bandwidth"])
        record["seconds"] = time.monotonic() - start
        if options.json:  # what was proven survives a later crash
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    broken = [figure for figure in record["figures"] if not figure["holds"]]
    print(f"{len(record['figures'])} cases, {len(broken)} broken, {record['seconds']:.0f} s")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
