"""Launches of a rank that holds an eighth of the vocabulary, with blocks of five drafts."""

import torch

from dspark.kernels.draft import kernel
from dspark.kernels.draft.types import DraftSampling
from dspark.kernels.linear.types import Bf16Weight
from dspark.kernels.tooling.entries import Example, meta

R, GAMMA, VOCAB, SHARD, RANK, HIDDEN = 3, 5, 129_280, 16_160, 256, 4096


def _block(sampled: bool, keep_logits: bool) -> None:
    sampling = DraftSampling(
        meta(torch.float32, R), meta(torch.bool, R), meta(torch.int64, R), meta(torch.int64, R)
    )
    kernel.markov_block(
        meta(torch.float32, R, GAMMA, SHARD),
        meta(torch.int64, R),
        meta(torch.bfloat16, VOCAB, RANK),
        Bf16Weight(meta(torch.bfloat16, SHARD, RANK), None),
        sampling=sampling if sampled else None,
        keep_logits=keep_logits,
    )


def _greedy() -> None:
    _block(sampled=False, keep_logits=False)


def _sampled() -> None:
    _block(sampled=True, keep_logits=True)


def _seeded() -> None:
    _block(sampled=True, keep_logits=False)


def _confidence() -> None:
    kernel.confidence(
        meta(torch.bfloat16, R, GAMMA, HIDDEN),
        meta(torch.int64, R, GAMMA),
        meta(torch.bfloat16, VOCAB, RANK),
        meta(torch.float32, HIDDEN + RANK),
        meta(torch.float32, GAMMA),
    )


# Steps 0 and 1 have binaries of their own, because Triton knows these numbers.
LATER = 2

EXAMPLES = [
    Example("markov_step[greedy]", kernel._markov_step, _greedy, LATER, mma=True),
    Example("markov_step[sampled]", kernel._markov_step, _sampled, LATER, mma=True),
    Example("markov_step[seeded]", kernel._markov_step, _seeded, LATER, mma=True),
    Example("winner[block]", kernel._winner, _greedy),
    Example("confidence[rank 256]", kernel._confidence, _confidence),
]
