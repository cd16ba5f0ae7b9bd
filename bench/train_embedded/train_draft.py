"""Phase 2: the DSpark draft against the frozen target.

Half of the sequences are corpus text, half are continued by the target itself, at several
temperatures. Captures and final hidden states of all of them are computed once; every step then
draws sequences and random anchors.
"""

import time
from pathlib import Path
from typing import NamedTuple

import torch

from dspark.bench.train_embedded.attention import Ropes, build_ropes
from dspark.bench.train_embedded.config import dspark_of
from dspark.bench.train_embedded.data import Corpus, training_windows
from dspark.bench.train_embedded.draft import markov_heads, run_draft, stage
from dspark.bench.train_embedded.generate import generate
from dspark.bench.train_embedded.linear import Numerics
from dspark.bench.train_embedded.losses import draft_loss
from dspark.bench.train_embedded.optimise import Optimiser, schedule
from dspark.bench.train_embedded.parameters import init_draft, prepare
from dspark.bench.train_embedded.session import (
    Budget,
    balance,
    checkpoint,
    compiled,
    restore,
    step_generator,
)
from dspark.bench.train_embedded.store import Log
from dspark.bench.train_embedded.target import logits, run_target
from dspark.target.config import ModelConfig

Weights = dict[str, torch.Tensor]
# Share of the continued sequences at each temperature.
TEMPERATURES = ((0.0, 0.25), (0.6, 0.25), (1.0, 0.5))
LOG_SECONDS, SAVE_SECONDS = 4.0, 60.0


class Sizes(NamedTuple):
    sequences: int  # half corpus text, half continued by the target
    length: int  # tokens a sequence, a multiple of 128
    prompt: int  # corpus tokens at the head of a continued sequence
    generate_batch: int  # sequences continued at once
    batch: int  # sequences a step
    anchors: int  # blocks a sequence


class Sample(NamedTuple):
    ids: torch.Tensor  # i64 [S, N]
    captures: torch.Tensor  # [S, N, captured layers * D]
    hidden: torch.Tensor  # [S, N, D]

    def rows(self, index: torch.Tensor) -> "Sample":
        return Sample(self.ids[index], self.captures[index], self.hidden[index])


def train_draft(
    target: Weights,
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
    """Train from scratch, or on from `state_file`; returns the f32 masters of the draft.

    target: masters of the target.
    """
    masters = {
        n: w.detach().to(device).requires_grad_(w.requires_grad)
        for n, w in init_draft(config, seed + 1).items()
    }
    optimiser = Optimiser(masters)
    progress = restore(state_file, masters, optimiser, budget, device)
    ropes = build_ropes(config, sizes.length + dspark_of(config).block_size, device)
    with torch.no_grad():
        shared = prepare(target, numerics, quantised=True)
    begin = time.monotonic()
    sample = build_sample(shared, corpus, config, sizes, ropes, numerics, seed)
    log(phase="draft", sequences=len(sample.ids), seconds=time.monotonic() - begin)
    run_stage = compiled(stage, device, compile_blocks)
    loss_of = compiled(draft_loss, device, compile_blocks)
    biases = [masters[f"mtp.{i}.ffn.gate.bias"] for i in range(dspark_of(config).stages)]
    logged = saved = time.monotonic()
    while (fraction := progress()) < 1:
        generator = step_generator(seed, progress.step, device)
        pick = torch.randint(len(sample.ids), (sizes.batch,), generator=generator, device=device)
        part = sample.rows(pick)
        anchors = random_anchors(sizes, config, generator, device)
        weights = prepare(masters, numerics, quantised=True)
        drafted = run_draft(
            weights, shared, part.captures, part.ids.gather(1, anchors), anchors, ropes, config,
            numerics, run_stage,
        )  # fmt: skip
        previous, labels, wanted = block_targets(part, anchors, shared, config)
        heads = markov_heads(weights, drafted, previous, slice(None))
        loss = loss_of(heads.logits, wanted, labels, heads.confidence)
        loss.total.backward()
        optimiser.step(schedule(fraction))
        balance(biases, drafted.loads)
        progress.advance()
        now = time.monotonic()
        if now - logged > LOG_SECONDS or progress.step == 1:
            log(
                phase="draft", step=progress.step, progress=fraction, loss=loss.total.item(),
                cross_entropy=loss.cross_entropy.item(), distance=loss.distance.item(),
                confidence=loss.confidence.item(),
                accept_rate=[round(a, 4) for a in loss.accept_rate.tolist()],
                agreement=[round(a, 4) for a in loss.agreement.tolist()],
                seconds=time.monotonic() - begin,
            )  # fmt: skip
            logged = time.monotonic()
        if now - saved > SAVE_SECONDS:
            checkpoint(state_file, masters, optimiser, progress)
            saved = time.monotonic()
    checkpoint(state_file, masters, optimiser, progress)
    return masters


def build_sample(
    target: Weights,
    corpus: Corpus,
    config: ModelConfig,
    sizes: Sizes,
    ropes: Ropes,
    numerics: Numerics,
    seed: int,
) -> Sample:
    """Sequences with what the draft needs of the target at every position."""
    device = ropes.plain.cos.device
    generator = step_generator(seed + 7, 0, device)
    continued = sizes.sequences // 2
    parts = [training_windows(corpus, sizes.sequences - continued, sizes.length, generator)]
    for begin in range(0, continued, sizes.generate_batch):
        count = min(sizes.generate_batch, continued - begin)
        prompts = training_windows(corpus, count, sizes.prompt, generator)
        temperature = temperatures(count, device)
        parts.append(
            generate(target, prompts, sizes.length, temperature, ropes, config, numerics, generator)
        )
    return observe(target, torch.cat(parts), config, ropes, numerics)


def temperatures(count: int, device: torch.device) -> torch.Tensor:
    """f32 [count] in random-free proportions of `TEMPERATURES`, interleaved."""
    edges, total = [], 0.0
    for value, share in TEMPERATURES:
        total += share
        edges.append((total, value))
    # A stride coprime to the count would also do; the golden ratio spreads any count.
    places = [(i * 0.6180339887) % 1.0 for i in range(count)]
    values = [next(v for edge, v in edges if place < edge or edge >= 1.0) for place in places]
    return torch.tensor(values, device=device)


@torch.no_grad()
def observe(
    target: Weights, ids: torch.Tensor, config: ModelConfig, ropes: Ropes, numerics: Numerics
) -> Sample:
    """Run the target over sequences i64 [S, N]."""
    captures, hidden = [], []
    dense = torch.tensor(False, device=ids.device)
    for part in ids.split(64):
        result = run_target(target, part, ropes, config, numerics, dense=dense)
        captures.append(result.captures)
        hidden.append(result.hidden)
    return Sample(ids, torch.cat(captures), torch.cat(hidden))


def random_anchors(
    sizes: Sizes, config: ModelConfig, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """i64 [B, A] positions whose whole block, and its labels, lie inside the sequence."""
    last = sizes.length - 1 - dspark_of(config).block_size
    shape = (sizes.batch, sizes.anchors)
    return torch.randint(1, last + 1, shape, generator=generator, device=device)


@torch.no_grad()
def block_targets(
    sample: Sample, anchors: torch.Tensor, target: Weights, config: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of every block row: previous token, next token, and the target's logits for it.

    anchors: i64 [B, A]. Returns i64 [B, A, rows] twice and f32 [B, A, rows, V].
    """
    rows = torch.arange(dspark_of(config).block_size, device=anchors.device)
    positions = anchors[..., None] + rows
    batch = torch.arange(len(anchors), device=anchors.device)[:, None, None]
    wanted = logits(sample.hidden[batch, positions], target)
    return sample.ids[batch, positions], sample.ids[batch, positions + 1], wanted
