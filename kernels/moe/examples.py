"""One rank of the 256-expert model: hidden 4096, width 256 of 2048, six experts a row."""

import torch

from dspark.kernels.moe import kernel
from dspark.kernels.moe.types import ExpertWeights, Route
from dspark.kernels.tooling.entries import Example, meta

HIDDEN, WIDTH, EXPERTS, TOPK, VOCAB = 4096, 256, 256, 6, 129_280
# Rows that the bounds on pairs in `kernel` tell apart.
ONE, FEW, MANY, SORTED, PREFILL = 3, 9, 19, 97, 343


def _experts() -> ExpertWeights:
    def tiles(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (EXPERTS, rows // 16, columns // 256, 16)
        return meta(torch.int32, *shape, 32), meta(torch.uint8, *shape, 8)

    return ExpertWeights(*tiles(2 * WIDTH, HIDDEN), *tiles(HIDDEN, WIDTH), None, None)


def _moe(rows: int) -> None:
    kernel.moe_mxfp4(
        meta(torch.bfloat16, rows, HIDDEN),
        _experts(),
        Route(meta(torch.float32, rows, TOPK), meta(torch.int32, rows, TOPK)),
        7.0,
        meta(torch.bfloat16, rows, HIDDEN),
    )


def _one() -> None:
    _moe(ONE)


def _few() -> None:
    _moe(FEW)


def _many() -> None:
    _moe(MANY)


def _sorted() -> None:
    _moe(SORTED)


def _prefill() -> None:
    _moe(PREFILL)


def _route(by_hash: bool) -> None:
    kernel.route(
        meta(torch.float32, ONE, EXPERTS),
        None if by_hash else meta(torch.float32, EXPERTS),
        meta(torch.int32, VOCAB, TOPK) if by_hash else None,
        meta(torch.int64, ONE),
        TOPK,
        1.5,
    )


EXAMPLES = [
    Example("gate_up[few]", kernel._gate_up_of_pair, _few, mma=True),
    Example("down[one]", kernel._down_of_row, _one, mma=True),
    Example("down[few]", kernel._down_of_row, _few, mma=True),
    Example("gate_up[many]", kernel._gate_up, _many, mma=True),
    Example("down[many]", kernel._down, _many, mma=True),
    Example("gate_up[sorted]", kernel._gate_up, _sorted, mma=True),
    Example("down[sorted]", kernel._down, _sorted, mma=True),
    Example("gate_up[prefill]", kernel._gate_up, _prefill, mma=True),
    Example("down[prefill]", kernel._down, _prefill, mma=True),
    Example("combine", kernel._combine, _many),
    Example("route[bias]", kernel._route, lambda: _route(by_hash=False)),
    Example("route[hash]", kernel._route, lambda: _route(by_hash=True)),
]
