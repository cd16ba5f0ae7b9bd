"""Launches of a rank that holds an eighth of the vocabulary, with blocks of five drafts."""

import torch

from dspark.kernels.accept import kernel
from dspark.kernels.tooling.entries import Example, meta

R, V, SHARD = 3, 6, 16_160


def _greedy() -> None:
    kernel.accept_greedy(meta(torch.int64, R, V), meta(torch.float32, R * V, SHARD), **_lengths())


def _sampled(certain: bool = False) -> None:
    drafts = None if certain else meta(torch.float32, R, V - 1, SHARD)
    kernel.accept_sampled(
        meta(torch.int64, R, V),
        meta(torch.float32, R * V, SHARD),
        drafts,
        temperature=meta(torch.float32, R),
        seed=meta(torch.int64, R),
        **_lengths(),
    )


def _certain() -> None:
    _sampled(certain=True)


def _lengths() -> dict[str, torch.Tensor]:
    return {"acceptable": meta(torch.int32, R), "committed": meta(torch.int64, R)}


EXAMPLES = [
    Example("row_best[fp32]", kernel._row_best_kernel, _greedy),
    Example("row_sums[fp32]", kernel._row_sums_kernel, _sampled),
    Example("test[gamma 5]", kernel._test, _sampled),
    Example("test[gamma 5, certain drafts]", kernel._test, _certain),
    Example("race[gamma 5]", kernel._race, _sampled),
    Example("race[gamma 5, certain drafts]", kernel._race, _certain),
    Example("report[greedy]", kernel._report, _greedy),
    Example("report[sampled]", kernel._report, _sampled),
]
