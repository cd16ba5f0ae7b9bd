"""From the draft model's block to drafts: Markov refinement, sampling and confidence.

A block has gamma rows, the width the draft was trained with; of its drafts the first `depth` may
be verified. R requests, N tokens in the vocabulary.
"""

from typing import NamedTuple

import torch

from dspark.kernels.collective import Group, gather_vocab
from dspark.kernels.draft import Confidence, MarkovBlock, confidence, markov_block
from dspark.kernels.linear import Bf16Weight
from dspark.speculation.requests import Requests


class DraftHead(NamedTuple):
    """What turns a block's hidden rows and logits into drafts."""

    markov_w1: torch.Tensor  # [N, rank]
    markov_w2: Bf16Weight  # [shard, rank]
    confidence: torch.Tensor  # f32 [hidden + rank]
    temperature: torch.Tensor  # f32 [gamma] calibration of the confidence, ones without one
    rank: int  # of this process in `group`
    group: Group  # ranks that share the vocabulary, None on one rank


class Proposal(NamedTuple):
    tokens: torch.Tensor  # i64 [R, depth]
    logits: torch.Tensor | None  # f32 [R, depth, N] proposal distribution; None = deterministic
    confidence: torch.Tensor  # f32 [R, gamma] calibrated chance that the draft is accepted
    confidence_logit: torch.Tensor  # f32 [R, gamma] the same before calibration


def propose(
    logits: torch.Tensor, hidden: torch.Tensor, requests: Requests, head: DraftHead, depth: int
) -> Proposal:
    """Draw the drafts of every request, and say how far to trust each.

    Args:
        logits: f32 [R * gamma, shard] of the draft block, this rank's shard of the vocabulary.
        hidden: [R * gamma, hidden] the same rows before the draft's final norm.
    """
    count = requests.slot.shape[0]
    block = _draw(logits.view(count, -1, logits.shape[-1]), requests, head)
    trust = _trust(hidden.view(count, -1, hidden.shape[-1]), block.tokens, requests, head)
    distribution = None
    if not requests.params.all_greedy:
        distribution = gather_vocab(block.logits, head.group)[:, :depth]
    return Proposal(block.tokens[:, :depth], distribution, trust.probability, trust.logit)


def with_bonus(requests: Requests, drafts: torch.Tensor) -> torch.Tensor:
    """i64 [R, depth] drafts -> i64 [R, depth + 1] candidates: what the verify rows run."""
    return torch.cat([requests.bonus[:, None], drafts], 1)


def _draw(logits: torch.Tensor, requests: Requests, head: DraftHead) -> MarkovBlock:
    sampled = not requests.params.all_greedy
    return markov_block(
        logits,
        requests.bonus,
        head.markov_w1,
        head.markov_w2,
        temperature=requests.params.temperature if sampled else None,
        greedy=requests.params.greedy if sampled else None,
        seed=requests.seed if sampled else None,
        prefix_len=requests.committed if sampled else None,
        vocab_start=head.rank * logits.shape[2],
        group=head.group,
    )


def _trust(
    hidden: torch.Tensor, drafts: torch.Tensor, requests: Requests, head: DraftHead
) -> Confidence:
    followed = with_bonus(requests, drafts[:, :-1])
    return confidence(hidden, followed, head.markov_w1, head.confidence, head.temperature)
