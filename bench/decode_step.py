"""Time one decode step of a tensor-parallel rank's share of the model, and count its launches.

    dspark make-checkpoint CHECKPOINT --config mini-rank
    python -m dspark.bench.decode_step CHECKPOINT [--rows 1 6 8 48] [--context 2048] [--json FILE]

The step is captured in a CUDA graph: metadata, blocks, head. Small models of one or two layers
give the cost of each layer kind, from which the 43 layers of Flash are added up. Collectives are
not included: a single GPU has none. `rows` above 1 are verify rows of one request.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch.autograd import DeviceType

from dspark.bench.environment import describe
from dspark.bench.graph_time import median_time
from dspark.bench.local_target import LocalTarget
from dspark.kernels.compress import rows_fit_ring
from dspark.kernels.step import BatchRows, Bounds, Rings, step_meta
from dspark.kernels.tooling.launch_counts import count_launches
from dspark.target.attention import Forward
from dspark.target.caches import C128_PER_PAGE, PAGE_TOKENS
from dspark.target.config import ModelConfig
from dspark.target.model import logits, run_layers
from dspark.target.weights import TargetWeights, load_target

FLASH_LAYERS = {0: 2, 4: 21, 128: 20}  # ratio -> layers of DeepSeek-V4-Flash
REPLAYS = 50
CHAIN = 8  # replays in a row: while one runs the host starts the next, so its delay hides


class Cost(NamedTuple):
    microseconds: float  # median of graph replays
    triton_launches: int
    all_launches: int  # torch's kernels and copies too


def with_layers(
    weights: TargetWeights, config: ModelConfig, layers: list[int]
) -> tuple[TargetWeights, ModelConfig]:
    """The model reduced to `layers` of itself."""
    ratios = tuple(config.compress_ratios[i] for i in layers)
    small = dataclasses.replace(
        config, num_hidden_layers=len(layers), compress_ratios=ratios, dspark=None
    )
    return weights._replace(blocks=[weights.blocks[i] for i in layers]), small


def measure(weights: TargetWeights, config: ModelConfig, rows: int, context: int) -> Cost:
    """One step of `rows` rows after `context` tokens, whose cache content is zeros."""
    model = LocalTarget(
        weights, config, max_tokens=context + PAGE_TOKENS, verify_width=6, device="cuda"
    )
    for cache in model.caches:
        for pool in (cache.window, cache.compressed, cache.index):
            if pool is not None:
                pool.zero_()
    ids = torch.arange(rows, device="cuda") + 5
    slot, prefix = model.tensor([1]), model.tensor([context])
    length = model.tensor([rows])

    def step() -> torch.Tensor:
        meta = step_meta(
            BatchRows(slot, prefix, length, rows, rows),
            model.tables,
            Bounds(config.sliding_window, model.max_pages, model.max_pages * C128_PER_PAGE),
            Rings(model.geometry.c4.ring, model.geometry.c128.ring),
            store_all=True,
        )
        out = run_layers(
            weights.embed[ids],
            ids,
            weights,
            config,
            Forward(meta, rows_fit_ring(rows, model.geometry.c4.ring), model.rope, model.caches),
        )
        return logits(out.hidden, weights)

    with torch.no_grad():
        step()
        with count_launches() as counted:
            step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        kernels = sum(e.count for e in profile.key_averages() if e.device_type == DeviceType.CUDA)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()

    def chain() -> None:
        for _ in range(CHAIN):
            graph.replay()

    return Cost(median_time(chain, REPLAYS) / CHAIN, counted.total(), kernels)


def flash_step(weights: TargetWeights, config: ModelConfig, rows: int, context: int) -> dict:
    """Cost of each layer kind (a model with one more layer, minus one without) and of Flash."""
    first = {r: config.compress_ratios.index(r) for r in FLASH_LAYERS}
    base = measure(*with_layers(weights, config, [first[0]]), rows, context)
    kinds, total = {}, {}
    for ratio in FLASH_LAYERS:
        layers = [first[0], first[ratio]]
        more = measure(*with_layers(weights, config, layers), rows, context)
        kinds[ratio] = Cost(
            more.microseconds - base.microseconds,
            more.triton_launches - base.triton_launches,
            more.all_launches - base.all_launches,
        )
    for field in Cost._fields:
        total[field] = (
            getattr(base, field)
            - getattr(kinds[0], field)
            + sum(n * getattr(kinds[r], field) for r, n in FLASH_LAYERS.items())
        )
    return {
        "rows": rows,
        "context": context,
        "layer": {f"ratio {r}": cost._asdict() for r, cost in kinds.items()},
        "flash_43_layers_and_head": total,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dspark.bench.decode_step")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6, 8, 48])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    config = ModelConfig.from_checkpoint(arguments.checkpoint)
    weights = load_target(arguments.checkpoint, config, device="cuda")
    results = []
    for rows in arguments.rows:
        results.append(flash_step(weights, config, rows, arguments.context))
        print(json.dumps(results[-1]), flush=True)
    if arguments.json:
        record = {"environment": describe(), "steps": results}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
