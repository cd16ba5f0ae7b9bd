"""Phase 1: the target, by next-token prediction, with the indexer imitating the attention."""

import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dspark.bench.train_embedded.attention import Ropes, build_ropes
from dspark.bench.train_embedded.data import HELD_OUT, Corpus, training_windows, windows
from dspark.bench.train_embedded.linear import Numerics
from dspark.bench.train_embedded.optimise import Optimiser, schedule
from dspark.bench.train_embedded.parameters import init_target, prepare
from dspark.bench.train_embedded.session import (
    Budget,
    balance,
    checkpoint,
    compiled,
    restore,
    step_generator,
)
from dspark.bench.train_embedded.store import Log
from dspark.bench.train_embedded.target import block, logits, run_target
from dspark.target.config import ModelConfig

Weights = dict[str, torch.Tensor]
SPARSE_FROM = 0.2  # of the run: C4 layers then see only the entries their indexer chooses
QUANTISED_FROM = 0.3  # of the run: weights then pass through the served formats
LOG_SECONDS, SAVE_SECONDS = 4.0, 60.0


class Sizes(NamedTuple):
    batch: int  # sequences a step
    length: int  # tokens a sequence, a multiple of 128
    held_out: int  # windows of each held-out stream


def train_target(
    corpus: Corpus,
    config: ModelConfig,
    sizes: Sizes,
    budget: Budget,
    numerics: Numerics,
    device: torch.device,
    *,
    seed: int,
    state_file: Path,
    log: Log,
    compile_blocks: bool = True,
) -> Weights:
    """Train from scratch, or on from `state_file`; returns the f32 masters."""
    masters = {
        n: w.detach().to(device).requires_grad_(w.requires_grad)
        for n, w in init_target(config, seed).items()
    }
    optimiser = Optimiser(masters)
    progress = restore(state_file, masters, optimiser, budget, device)
    ropes = build_ropes(config, sizes.length, device)
    run_block = compiled(block, device, compile_blocks)
    biases = [
        masters[f"layers.{layer}.ffn.gate.bias"]
        for layer in range(config.num_hash_layers, config.num_hidden_layers)
    ]
    logged = saved = begin = time.monotonic()
    tokens = 0
    while (fraction := progress()) < 1:
        ids = training_windows(
            corpus, sizes.batch, sizes.length + 1, step_generator(seed, progress.step, device)
        )
        weights = prepare(masters, numerics, quantised=fraction >= QUANTISED_FROM)
        dense = torch.tensor(fraction < SPARSE_FROM, device=device)
        result = run_target(
            weights, ids[:, :-1], ropes, config, numerics, dense=dense, run_block=run_block
        )
        loss = F.cross_entropy(logits(result.hidden, weights).flatten(0, 1), ids[:, 1:].flatten())
        (loss + result.index_loss).backward()
        optimiser.step(schedule(fraction))
        balance(biases, result.loads[config.num_hash_layers :])
        progress.advance()
        tokens += ids.numel()
        now = time.monotonic()
        if now - logged > LOG_SECONDS or progress.step == 1:
            log(
                phase="target", step=progress.step, progress=fraction, loss=loss.item(),
                index_loss=result.index_loss.item(), seconds=time.monotonic() - begin,
                tokens=tokens,
            )  # fmt: skip
            logged = time.monotonic()
        if now - saved > SAVE_SECONDS:
            checkpoint(state_file, masters, optimiser, progress)
            log(phase="target", **held_out_loss(masters, corpus, ropes, config, numerics, sizes))
            saved = time.monotonic()
    checkpoint(state_file, masters, optimiser, progress)
    log(
        phase="target", done=True, step=progress.step,
        **held_out_loss(masters, corpus, ropes, config, numerics, sizes),
    )  # fmt: skip
    return masters


@torch.no_grad()
def held_out_loss(
    masters: Weights,
    corpus: Corpus,
    ropes: Ropes,
    config: ModelConfig,
    numerics: Numerics,
    sizes: Sizes,
) -> dict[str, float]:
    """Mean loss in nats per token of the quantised model on each held-out stream."""
    device = ropes.plain.cos.device
    weights = prepare(masters, numerics, quantised=True)
    losses = {}
    for name in HELD_OUT:
        length = min(sizes.length, (len(corpus.streams[name]) - 1) // 128 * 128)
        ids = windows(corpus, name, sizes.held_out, length + 1, step_generator(0, 0, device))
        total = 0.0
        for part in ids.split(8):
            result = run_target(
                weights, part[:, :-1], ropes, config, numerics,
                dense=torch.tensor(False, device=device),
            )  # fmt: skip
            scores = logits(result.hidden, weights).flatten(0, 1)
            total += F.cross_entropy(scores, part[:, 1:].flatten(), reduction="sum").item()
        losses[name] = total / ids[:, 1:].numel()
    return losses
