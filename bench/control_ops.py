"""Time the step, draft, schedule, accept and state kernels inside CUDA graphs.

    python -m dspark.bench.control_ops [--requests 1 8 64] [--sm89] [--json FILE]

Prints microseconds an op (median of graph replays); `--sm89` runs the Ada instruction stream on a
Hopper card. `dspark.bench.stock_ops` compares some of them with those of stock SGLang.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from dspark.bench.graph_time import graph_time
from dspark.kernels import sm89_on_sm90
from dspark.kernels.accept import accept_greedy, accept_sampled
from dspark.kernels.draft import confidence, markov_block
from dspark.kernels.linear import prepare_bf16
from dspark.kernels.schedule import schedule
from dspark.kernels.state import c128_rollback, clear_pages, clear_slots
from dspark.kernels.step import draft_meta, empty_draft_meta, empty_step_meta, step_meta

GAMMA, V, VOCAB, SHARD, RANK, HIDDEN = 5, 6, 129_280, 16_160, 256, 4096
PAGE, RING_C4, RING_C128, C4_LAYERS, C128_LAYERS = 256, 16, 136, 21, 20
Case = tuple[str, Callable[[], object]]


def timed(launch: Callable[[], object]) -> float:
    """Microseconds of one launch."""
    return graph_time(lambda _: launch(), chain=20, repeats=50)


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def schedule_cases(requests: int) -> Iterator[Case]:
    for budget in (0, 2 * requests, GAMMA * requests):
        conf = torch.rand(requests, GAMMA, device="cuda")
        yield f"schedule budget {budget}", partial(schedule, conf, i32(budget))


def metadata_cases(requests: int, context: int) -> Iterator[Case]:
    pages = context // PAGE
    slots = requests + 1
    tokens = torch.arange(PAGE, (slots * pages + 1) * PAGE, device="cuda")
    arguments: dict[str, Any] = {
        "req_slot": torch.arange(1, slots, device="cuda"),
        "prefix_len": torch.full((requests,), context - V, device="cuda"),
        "req_to_token": tokens.view(slots, -1).int(),
        "full_to_swa": torch.arange((slots * pages + 1) * PAGE, device="cuda"),
        "window": 128,
    }
    device = torch.device("cuda")
    shape: dict[str, Any] = {
        "max_pages": pages,
        "max_c128": 2 * pages,
        "window": 128,
        "device": device,
    }
    step_out = empty_step_meta(rows=requests * V, requests=requests, **shape)
    draft_out = empty_draft_meta(requests=requests, gamma=GAMMA, window=128, device=device)
    row_len = torch.full((requests,), V, device="cuda")
    valid_from = torch.zeros(requests, dtype=torch.int64, device="cuda")
    yield (
        "step_meta verify",
        lambda: step_meta(
            **arguments,
            row_len=row_len,
            rows=requests * V,
            stride=V,
            store_all=True,
            ring_c4=RING_C4,
            ring_c128=RING_C128,
            max_pages=pages,
            max_c128=2 * pages,
            out=step_out,
        ),
    )
    yield (
        "draft_meta",
        lambda: draft_meta(**arguments, gamma=GAMMA, valid_from=valid_from, out=draft_out),
    )


def draft_cases(requests: int) -> Iterator[Case]:
    base = torch.randn(requests, GAMMA, SHARD, device="cuda")
    prev = torch.randint(0, SHARD, (requests,), device="cuda")
    w1 = torch.randn(VOCAB, RANK, device="cuda").bfloat16()
    w2 = prepare_bf16(torch.randn(SHARD, RANK, device="cuda").bfloat16())
    keys: dict[str, Any] = {
        "temperature": torch.ones(requests, device="cuda"),
        "greedy": torch.zeros(requests, dtype=torch.bool, device="cuda"),
        "seed": torch.arange(requests, device="cuda"),
        "prefix_len": torch.arange(requests, device="cuda"),
    }
    yield "markov_block greedy", lambda: markov_block(base, prev, w1, w2)
    yield "markov_block sampled", lambda: markov_block(base, prev, w1, w2, **keys)
    hidden = torch.randn(requests, GAMMA, HIDDEN, device="cuda").bfloat16()
    tokens = torch.randint(0, VOCAB, (requests, GAMMA), device="cuda")
    proj, ones = torch.randn(HIDDEN + RANK, device="cuda"), torch.ones(GAMMA, device="cuda")
    yield "confidence", lambda: confidence(hidden, tokens, w1, proj, ones)


def accept_cases(requests: int) -> Iterator[Case]:
    logits = torch.randn(requests * V, VOCAB, device="cuda")
    q = torch.randn(requests, GAMMA, VOCAB, device="cuda")
    candidates = torch.randint(0, VOCAB, (requests, V), device="cuda")
    lengths: dict[str, Any] = {
        "verify_len": torch.full((requests,), V, dtype=torch.int32, device="cuda"),
        "prefix_len": torch.arange(requests, device="cuda"),
    }
    keys: dict[str, Any] = {
        "temperature": torch.ones(requests, device="cuda"),
        "greedy": torch.zeros(requests, dtype=torch.bool, device="cuda"),
        "seed": torch.arange(requests, device="cuda"),
    }
    shard = logits[:, :SHARD].contiguous()
    yield "accept_greedy, one shard", lambda: accept_greedy(candidates, shard, **lengths)
    yield "accept_greedy, whole vocabulary", lambda: accept_greedy(candidates, logits, **lengths)
    yield "accept_sampled", lambda: accept_sampled(candidates, logits, q, **lengths, **keys)


def state_cases(requests: int) -> Iterator[Case]:
    slots = max(requests, 8) + 1
    c128 = torch.zeros(C128_LAYERS, slots * RING_C128, 1024, device="cuda")
    attention = torch.zeros(C4_LAYERS, 64 * RING_C4, 2048, device="cuda")
    indexer = torch.zeros(C4_LAYERS, 64 * RING_C4, 512, device="cuda")
    slot = torch.arange(1, requests + 1, device="cuda")
    seq_len = torch.arange(requests, device="cuda") * 100
    commit, verify = i32(*[1] * requests), i32(*[V] * requests)
    page = torch.arange(1, min(requests, 63) + 1, device="cuda")
    yield (
        "c128_rollback, all drafts rejected",
        lambda: c128_rollback(c128, slot, seq_len, commit, verify, ring=RING_C128, verify_rows=V),
    )
    yield "clear_slots, one slot", lambda: clear_slots(c128, slot[:1], ring=RING_C128)
    yield (
        "clear_pages, C4 and indexer",
        lambda: clear_pages([attention, indexer], page, ring=RING_C4),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=8192, help="tokens a request holds")
    parser.add_argument("--sm89", action="store_true", help="Ada code generation on a Hopper card")
    parser.add_argument("--json", help="also write the figures here")
    options = parser.parse_args()
    if options.sm89:
        sm89_on_sm90.install(tempfile.mkdtemp(prefix="sm89-"))

    figures = []
    for requests in options.requests:
        for cases in (
            schedule_cases(requests),
            metadata_cases(requests, options.context),
            draft_cases(requests),
            accept_cases(requests) if requests <= 8 else (),
            state_cases(requests),
        ):
            for name, launch in cases:
                figures.append({"op": name, "requests": requests, "us": timed(launch)})
    for figure in figures:
        print(f"R={figure['requests']:<3} {figure['op']:36} {figure['us']:8.2f} us")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
