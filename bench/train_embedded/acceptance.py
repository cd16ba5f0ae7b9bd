"""How many drafted tokens the target accepts, computed on sequences that the target produced.

At temperature 0 a block at anchor L accepts the longest prefix of the draft's greedy chain that
equals the sequence. At temperature 1, given that the target emitted y, draft row k survives with
probability min(1, q(y) / p(y)): the same law as rejection sampling, without running it. Walking
from anchor to anchor by accepted + 1 tokens gives the blocks that a server would have run.
"""

from typing import NamedTuple

import torch

from dspark.bench.train_embedded.attention import Ropes
from dspark.bench.train_embedded.config import dspark_of
from dspark.bench.train_embedded.draft import markov_heads, run_draft
from dspark.bench.train_embedded.linear import Numerics
from dspark.bench.train_embedded.train_draft import Sample, block_targets
from dspark.target.config import ModelConfig

Weights = dict[str, torch.Tensor]


class Blocks(NamedTuple):
    """The blocks a server would have run, of all sequences."""

    accepted: torch.Tensor  # i64 [n] drafts accepted, 0..gamma
    confidence: torch.Tensor  # f32 [n, gamma] raw logits


class Summary(NamedTuple):
    accepted_length: float  # mean tokens a step, bonus included
    conditional: list[float]  # chance of row k given that all rows before it were accepted
    blocks: int


@torch.no_grad()
def measure(
    sample: Sample,
    first: int,
    greedy: bool,
    draft: Weights,
    shared: Weights,
    ropes: Ropes,
    config: ModelConfig,
    numerics: Numerics,
    generator: torch.Generator,
) -> Blocks:
    """Blocks over sequences [S, N] that the target produced from position `first` on.

    draft, shared: prepared tensors of draft and target. greedy: whether the sequences are greedy.
    """
    gamma = dspark_of(config).block_size
    length = sample.ids.shape[1]
    anchors = torch.arange(first, length - gamma - 1, device=sample.ids.device)
    accepted, confidence = [], []
    for index in torch.arange(len(sample.ids), device=sample.ids.device).split(4):
        part = sample.rows(index)
        every = anchors.expand(len(index), -1)
        outcome = _accept_everywhere(
            part, every, greedy, draft, shared, ropes, config, numerics, generator
        )
        for counts, logits in zip(*outcome, strict=True):
            run = _walk(counts.tolist())
            accepted.append(counts[run])
            confidence.append(logits[run])
    return Blocks(torch.cat(accepted).cpu(), torch.cat(confidence).cpu())


def summarise(blocks: Blocks) -> Summary:
    gamma = blocks.confidence.shape[1]
    reached = [(blocks.accepted >= k).sum().item() for k in range(gamma + 1)]
    conditional = [reached[k + 1] / max(1, reached[k]) for k in range(gamma)]
    return Summary(1 + blocks.accepted.double().mean().item(), conditional, len(blocks.accepted))


def _accept_everywhere(
    part: Sample,
    anchors: torch.Tensor,
    greedy: bool,
    draft: Weights,
    shared: Weights,
    ropes: Ropes,
    config: ModelConfig,
    numerics: Numerics,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(accepted i64 [B, A], confidence logits f32 [B, A, gamma]) of blocks at all anchors."""
    drafted = run_draft(
        draft, shared, part.captures, part.ids.gather(1, anchors), anchors, ropes, config, numerics
    )
    previous, labels, wanted = block_targets(part, anchors, shared, config)
    if greedy:
        token, survives, confidence = previous[..., 0], [], []
        for row in range(labels.shape[-1]):
            heads = markov_heads(draft, drafted, token, row)
            token = heads.logits.argmax(-1)
            survives.append(token == labels[..., row])
            confidence.append(heads.confidence)
        alive, logits = torch.stack(survives, -1), torch.stack(confidence, -1)
    else:
        heads = markov_heads(draft, drafted, previous, slice(None))
        at = labels[..., None]
        ratio = heads.logits.log_softmax(-1).gather(-1, at) - wanted.log_softmax(-1).gather(-1, at)
        draw = torch.rand(labels.shape, generator=generator, device=labels.device)
        alive, logits = draw.log() < ratio[..., 0], heads.confidence
    return alive.long().cumprod(-1).sum(-1), logits


def _walk(accepted: list[int]) -> list[int]:
    """Indices of the anchors that are block starts when every block moves on by accepted + 1."""
    visited, at = [], 0
    while at < len(accepted):
        visited.append(at)
        at += accepted[at] + 1
    return visited
