"""Time the step, draft, schedule, accept and state kernels inside CUDA graphs.

    python -m dspark.bench.control_ops [--requests 1 8 64] [--sm89] [--json FILE]

Prints microseconds an op (median of graph replays); `--sm89` runs the Ada instruction stream on a
Hopper card. `dspark.bench.stock_ops` compares some of them with those of stock SGLang.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import torch

from dspark.bench.graph_time import graph_time
from dspark.bench.op_case import OpCase, copies_on
from dspark.bench.tune.op import seeded
from dspark.kernels.accept import accept_greedy, accept_sampled
from dspark.kernels.draft import DraftSampling, confidence, markov_block
from dspark.kernels.linear import prepare_bf16
from dspark.kernels.sampling import choose, cut_tails
from dspark.kernels.schedule import schedule
from dspark.kernels.state import c128_rollback, clear_pages, clear_slots
from dspark.kernels.step import (
    BatchRows,
    BlockRows,
    Bounds,
    Rings,
    Tables,
    draft_meta,
    empty_draft_meta,
    empty_step_meta,
    step_meta,
)
from dspark.kernels.tooling import sm89_on_sm90

GAMMA, V, VOCAB, SHARD, RANK, HIDDEN = 5, 6, 129_280, 16_160, 256, 4096
PAGE, RING_C4, RING_C128, C4_LAYERS, C128_LAYERS = 256, 16, 136, 21, 20
CUDA = torch.device("cuda")


def time_of(case: OpCase) -> float:
    """Microseconds of one launch."""
    return graph_time(case.launch, copies=len(case.inputs), chain=20, repeats=50)


def schedule_cases(requests: int, device: torch.device = CUDA) -> Iterator[OpCase]:
    random = seeded(device, requests)
    for label, budget in (("none", 0), ("part", 2 * requests), ("full", GAMMA * requests)):
        conf = torch.rand(requests, GAMMA, device=device, generator=random)
        admit = torch.tensor([budget], dtype=torch.int32, device=device)
        yield OpCase(
            f"schedule, {label} admitted", schedule, [{"confidence": conf, "budget": admit}]
        )


def metadata_cases(requests: int, context: int, device: torch.device = CUDA) -> Iterator[OpCase]:
    pages = context // PAGE
    slots = requests + 1
    tokens = torch.arange(PAGE, (slots * pages + 1) * PAGE, device=device)
    request_slot = torch.arange(1, slots, device=device)
    committed = torch.full((requests,), context - V, device=device)
    tables = Tables(
        tokens.view(slots, -1).int(), torch.arange((slots * pages + 1) * PAGE, device=device)
    )
    bounds = Bounds(128, max_pages=pages, max_c128=2 * pages)
    total = requests * V
    step: dict[str, Any] = {
        "rows": BatchRows(request_slot, committed, torch.full_like(committed, V), total, V),
        "tables": tables,
        "bounds": bounds,
        "rings": Rings(RING_C4, RING_C128),
        "store_all": True,
        "out": empty_step_meta(total, requests, bounds, device=device),
    }
    yield OpCase("step_meta verify", step_meta, [step])
    draft: dict[str, Any] = {
        "rows": BlockRows(request_slot, committed, torch.zeros_like(committed), GAMMA),
        "tables": tables,
        "window": 128,
        "out": empty_draft_meta(requests=requests, gamma=GAMMA, window=128, device=device),
    }
    yield OpCase("draft_meta", draft_meta, [draft])


def sampling(requests: int, device: torch.device) -> dict[str, torch.Tensor]:
    """What a sampled request brings: temperature 1, seed and position."""
    return {
        "temperature": torch.ones(requests, device=device),
        "seed": torch.arange(requests, device=device),
        "committed": torch.arange(requests, device=device),
    }


def draft_cases(requests: int, device: torch.device = CUDA) -> Iterator[OpCase]:
    random = seeded(device, requests)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=random)

    def tokens(below: int, *size: int) -> torch.Tensor:
        return torch.randint(0, below, size, device=device, generator=random)

    w1 = normal(VOCAB, RANK).bfloat16()
    moved = 2 * SHARD * RANK + 2 * 4 * requests * GAMMA * SHARD
    greedy = [
        {
            "base": normal(requests, GAMMA, SHARD),
            "prev": tokens(SHARD, requests),
            "w1": w1,
            "w2": prepare_bf16(normal(SHARD, RANK).bfloat16()),
        }
        for _ in range(copies_on(device, moved))
    ]
    unseeded = torch.zeros(requests, dtype=torch.bool, device=device)
    keys = {"sampling": DraftSampling(**sampling(requests, device), seeded=unseeded)}
    yield OpCase("markov_block greedy", markov_block, greedy, moved)
    yield OpCase("markov_block sampled", markov_block, [each | keys for each in greedy], moved)
    features = {
        "hidden": normal(requests, GAMMA, HIDDEN).bfloat16(),
        "prev_tokens": tokens(VOCAB, requests, GAMMA),
        "w1": w1,
        "proj": normal(HIDDEN + RANK) / 64,
        "temperature": torch.ones(GAMMA, device=device),
    }
    yield OpCase("confidence", confidence, [features])


def accept_cases(requests: int, device: torch.device = CUDA) -> Iterator[OpCase]:
    """Request r has (r + 3) % 6 right drafts, as far as the whole vocabulary decides."""
    random = seeded(device, requests)
    right = (torch.arange(requests, device=device) + 3) % V
    moved = 4 * requests * V * VOCAB
    shared = {"acceptable": torch.full((requests,), V, dtype=torch.int32, device=device)}
    whole, shards, sampled = [], [], []
    for _ in range(copies_on(device, moved)):
        logits = torch.randn(requests * V, VOCAB, device=device, generator=random)
        tokens = torch.randint(0, VOCAB, (requests, V), device=device, generator=random)
        best = logits.view(requests, V, -1).argmax(-1)
        is_right = torch.arange(GAMMA, device=device) < right[:, None]
        tokens[:, 1:] = torch.where(is_right, best[:, :-1], tokens[:, 1:])
        proposed = torch.randn(requests, GAMMA, VOCAB, device=device, generator=random)
        keys = sampling(requests, device)
        call = {**shared, "candidates": tokens, "committed": keys["committed"]}
        whole.append({**call, "logits": logits})
        shards.append({**call, "logits": logits[:, :SHARD].contiguous()})
        sampled.append({**call, **keys, "logits": logits, "draft_logits": proposed})
    yield OpCase("accept_greedy, one shard", accept_greedy, shards, moved * SHARD // VOCAB)
    yield OpCase("accept_greedy, whole vocabulary", accept_greedy, whole, moved)
    drafts = 4 * requests * GAMMA * VOCAB
    yield OpCase("accept_sampled", accept_sampled, sampled, moved + drafts)


def sampling_cases(requests: int, device: torch.device = CUDA) -> Iterator[OpCase]:
    """Whole vocabularies at verify width; half of the requests ask for top-p, half for top-k."""
    random = seeded(device, requests)
    moved = 4 * requests * V * VOCAB
    keys = sampling(requests, device)
    odd = torch.arange(requests, device=device) % 2 == 1
    wish = {
        "temperature": keys["temperature"],
        "top_k": torch.where(odd, 50, VOCAB).to(torch.int32),
        "top_p": torch.where(odd, 1.0, 0.9),
        "min_p": torch.zeros(requests, device=device),
    }
    named = {"seed": keys["seed"], "position": keys["committed"]}
    cuts, draws = [], []
    for _ in range(copies_on(device, moved)):
        logits = 3 * torch.randn(requests * V, VOCAB, device=device, generator=random)
        cuts.append({"logits": logits, **wish})
        draws.append({"logits": logits, "temperature": wish["temperature"], **named})
    yield OpCase("cut_tails", cut_tails, cuts, 5 * moved)
    yield OpCase("choose", choose, draws, moved)


def rollback_cases(requests: int, device: torch.device = CUDA) -> Iterator[OpCase]:
    slots = max(requests, 8) + 1
    call = {
        "pool": torch.ones(C128_LAYERS, slots * RING_C128, 1024, device=device),
        "request_slot": torch.arange(1, requests + 1, device=device),
        "committed": torch.arange(requests, device=device) * 100,
        "commit_len": torch.ones(requests, dtype=torch.int32, device=device),
        "rows_run": torch.full((requests,), V, dtype=torch.int32, device=device),
        "ring": RING_C128,
        "verify_width": V,
    }
    moved = C128_LAYERS * requests * GAMMA * 4096
    yield OpCase("c128_rollback, all drafts rejected", c128_rollback, [call], moved)


def clear_cases(requests: int, device: torch.device = CUDA) -> Iterator[OpCase]:
    slots = max(requests, 8) + 1
    c128 = torch.ones(C128_LAYERS, slots * RING_C128, 1024, device=device)
    attention = torch.ones(C4_LAYERS, 64 * RING_C4, 2048, device=device)
    indexer = torch.ones(C4_LAYERS, 64 * RING_C4, 512, device=device)
    slot = torch.ones(1, dtype=torch.int64, device=device)
    page = torch.arange(1, min(requests, 63) + 1, device=device)
    one_slot = {"pools": c128, "slots": slot, "ring": RING_C128}
    yield OpCase("clear_slots, one slot", clear_slots, [one_slot])
    both = {"pools": [attention, indexer], "pages": page, "ring": RING_C4}
    yield OpCase("clear_pages, C4 and indexer", clear_pages, [both])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=8192, help="tokens a request holds")
    parser.add_argument("--sm89", action="store_true", help="Ada code generation on a Hopper card")
    parser.add_argument("--json", help="also write the figures here")
    options = parser.parse_args()
    if options.sm89:
        sm89_on_sm90.install()

    figures = []
    for requests in options.requests:
        for cases in (
            schedule_cases(requests),
            metadata_cases(requests, options.context),
            draft_cases(requests),
            accept_cases(requests) if requests <= 8 else (),
            sampling_cases(requests) if requests <= 8 else (),
            rollback_cases(requests),
            clear_cases(requests),
        ):
            for case in cases:
                figures.append({"op": case.name, "requests": requests, "us": time_of(case)})
    for figure in figures:
        print(f"R={figure['requests']:<3} {figure['op']:36} {figure['us']:8.2f} us")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
