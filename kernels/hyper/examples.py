"""Sites and head of a 4096-wide model, for a few rows and for a prompt."""

import torch

from dspark.kernels.hyper import kernel
from dspark.kernels.hyper.types import HyperNumbers, HyperSite, HyperWeight
from dspark.kernels.tooling.entries import Example, meta

FEW, MANY, HIDDEN = 3, 67, 4096
NUMBERS = HyperNumbers(1e-6, 1e-6, 20)


def _streams(rows: int) -> torch.Tensor:
    return meta(torch.bfloat16, rows, 4, HIDDEN)


def _back(rows: int) -> tuple[torch.Tensor, ...]:
    """f, x, post, comb."""
    return (
        meta(torch.bfloat16, rows, HIDDEN),
        _streams(rows),
        meta(torch.float32, rows, 4),
        meta(torch.float32, rows, 4, 4),
    )


def _site(outputs: int, scales: int) -> HyperSite:
    fn = HyperWeight(meta(torch.float32, outputs, 4 * HIDDEN), None)
    return HyperSite(fn, meta(torch.float32, scales), meta(torch.float32, outputs))


def _mixing() -> tuple:
    """site, norm_w, numbers."""
    return _site(24, 3), meta(torch.bfloat16, HIDDEN), NUMBERS


def _pre(rows: int = FEW) -> None:
    kernel.mhc_pre(_streams(rows), *_mixing())


def _post_pre(rows: int = FEW) -> None:
    kernel.mhc_post_pre(*_back(rows), *_mixing())


def _head(rows: int = FEW) -> None:
    kernel.mhc_head(_streams(rows), _site(4, 1), NUMBERS)


EXAMPLES = [
    Example("project[pre, decode]", kernel._project, _pre),
    Example("project[pre, prefill]", kernel._project, lambda: _pre(MANY)),
    Example("project[post+pre, decode]", kernel._project, _post_pre),
    Example("project[post+pre, prefill]", kernel._project, lambda: _post_pre(MANY)),
    Example("project[head, decode]", kernel._project, _head),
    Example("project[head, prefill]", kernel._project, lambda: _head(MANY)),
    Example("mix[site]", kernel._mix, _pre),
    Example("mix[head]", kernel._mix, _head),
    Example("post", kernel._post, lambda: kernel.mhc_post(*_back(FEW))),
    Example("mean", kernel._mean, lambda: kernel.stream_mean(_streams(FEW))),
]
