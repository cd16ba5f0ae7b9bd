"""Launches over whole vocabularies, at blocks of five drafts."""

import torch

from dspark.kernels.sampling import kernel
from dspark.kernels.sampling.types import Cut
from dspark.kernels.tooling.entries import Example, meta

R, V, VOCAB = 3, 6, 129_280


def _choose(cut: bool = False) -> None:
    tails = Cut(meta(torch.float32, R * V), meta(torch.int64, R * V)) if cut else None
    kernel.choose(
        meta(torch.float32, R * V, VOCAB),
        meta(torch.float32, R),
        meta(torch.int64, R),
        meta(torch.int64, R),
        tails,
    )


def _choose_of_some() -> None:
    _choose(cut=True)


def _cut_tails() -> None:
    kernel.cut_tails(
        meta(torch.float32, R * V, VOCAB),
        meta(torch.float32, R),
        meta(torch.int32, R),
        meta(torch.float32, R),
        meta(torch.float32, R),
    )


EXAMPLES = [
    Example("choose[all tokens]", kernel._choose, _choose),
    Example("choose[cut]", kernel._choose, _choose_of_some),
    Example("row_top[fp32]", kernel._row_top, _cut_tails),
    Example("tally[first digit]", kernel._tally, _cut_tails),
    Example("tally[second digit]", kernel._tally, _cut_tails, launch=1),
    Example("tally[third digit]", kernel._tally, _cut_tails, launch=2),
    Example("last_token[fp32]", kernel._last_token, _cut_tails),
]
