"""From the draft model's block to drafts: Markov refinement, sampling and confidence.

A block has gamma rows, the width the draft was trained with; of its drafts the first `depth` may
be verified. R requests, N tokens in the vocabulary.
"""

from typing import NamedTuple

import torch

from dspark.kernels.collective import Group, gather_vocab
from dspark.kernels.draft import (
    Confidence,
    DraftSampling,
    MarkovBlock,
    confidence,
    markov_block,
)
from dspark.kernels.linear import Bf16Weight
from dspark.speculation.forced_drafts import ForcedDrafts
from dspark.speculation.sampling import Requests


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
    # f32 [R, depth, shard] logits the drafts were drawn from, this rank's shard; None = not needed
    logits: torch.Tensor | None
    confidence: torch.Tensor  # f32 [R, gamma] calibrated chance that the draft is accepted
    confidence_logit: torch.Tensor  # f32 [R, gamma] the same before calibration
    certain: torch.Tensor | None = None  # bool [R] drafts that were not drawn but given


def propose(
    logits: torch.Tensor,
    hidden: torch.Tensor,
    requests: Requests,
    head: DraftHead,
    depth: int,
    forced: ForcedDrafts | None = None,
) -> Proposal:
    """Draw the drafts of every request, and say how far to trust each.

    Args:
        logits: f32 [R * gamma, shard] of the draft block, this rank's shard of the vocabulary.
        hidden: [R * gamma, hidden] the same rows before the draft's final norm.
        forced: drafts to put in place of the model's.
    """
    count = requests.slot.shape[0]
    block = _draw(logits.view(count, -1, logits.shape[-1]), requests, head)
    trust = _trust(hidden.view(count, -1, hidden.shape[-1]), block.tokens, requests, head)
    drawn_from = None if block.logits is None else block.logits[:, :depth]
    tokens, certain = block.tokens[:, :depth], None
    if forced is not None:
        tokens, certain = forced.replace(tokens, requests.slot, requests.committed)
    return Proposal(tokens, drawn_from, trust.probability, trust.logit, certain)


def proposal_law(proposal: Proposal, some: torch.Tensor, group: Group) -> torch.Tensor:
    """f32 [S, depth, N] logits the drafts of the requests `some` (i64 [S]) were drawn from."""
    assert proposal.logits is not None, "kept where a request samples without a seed"
    logits = gather_vocab(proposal.logits[some], group)
    if proposal.certain is None:
        return logits
    draft = proposal.tokens[some, :, None]
    sure = torch.full_like(logits, -torch.inf).scatter_(2, draft, 0.0)
    return torch.where(proposal.certain[some, None, None], sure, logits)


def with_bonus(requests: Requests, drafts: torch.Tensor) -> torch.Tensor:
    """i64 [R, depth] drafts -> i64 [R, depth + 1] candidates: what the verify rows run."""
    return torch.cat([requests.bonus[:, None], drafts], 1)


def _draw(logits: torch.Tensor, requests: Requests, head: DraftHead) -> MarkovBlock:
    sampling = DraftSampling(
        requests.params.temperature, requests.seeded, requests.seed, requests.committed
    )
    return markov_block(
        logits,
        requests.bonus,
        head.markov_w1,
        head.markov_w2,
        sampling=None if requests.params.all_greedy else sampling,
        keep_logits=requests.unseeded > 0,
        vocab_start=head.rank * logits.shape[2],
        group=head.group,
    )


def _trust(
    hidden: torch.Tensor, drafts: torch.Tensor, requests: Requests, head: DraftHead
) -> Confidence:
    followed = with_bonus(requests, drafts[:, :-1])
    return confidence(hidden, followed, head.markov_w1, head.confidence, head.temperature)
