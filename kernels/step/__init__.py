"""The addresses one forward needs, computed once and shared by all layers.

Every tensor has a static shape; counts live on the device. Padded rows carry position 0,
`row_req` -1, every location and index -1 and every length 0, so that writers skip them and
readers see empty lists.
"""

from torch import Tensor

from dspark.kernels.common.dispatch import op
from dspark.kernels.step import reference
from dspark.kernels.step.types import DraftMeta, StepMeta, empty_draft_meta, empty_step_meta

__all__ = [
    "DraftMeta",
    "StepMeta",
    "draft_meta",
    "empty_draft_meta",
    "empty_step_meta",
    "step_meta",
]


def _step_fits(
    request_slot: Tensor,
    committed: Tensor,
    row_len: Tensor,
    rows: int,
    stride: int | None,
    page: int,
    ring_c4: int,
    ring_c128: int,
) -> None:
    _one_per_request(request_slot=request_slot, committed=committed, row_len=row_len)
    if stride is not None and rows != request_slot.shape[0] * stride:
        raise ValueError(f"{request_slot.shape[0]} requests of {stride} rows are not {rows} rows")
    if page % 128:
        raise ValueError(f"page must be a multiple of 128 tokens, got {page}")
    if ring_c4 < 8 or ring_c4 % 4 or page % ring_c4:
        raise ValueError(
            f"ring_c4 must be >= 8, a multiple of 4 and divide the page {page}, got {ring_c4}"
        )
    if ring_c128 < 128:
        raise ValueError(f"ring_c128 must be >= 128, got {ring_c128}")


def _block_fits(
    request_slot: Tensor, committed: Tensor, valid_from: Tensor, gamma: int, window: int
) -> None:
    if gamma < 1 or window < 1:
        raise ValueError(f"draft_meta needs gamma and window >= 1, got {gamma} and {window}")
    _one_per_request(request_slot=request_slot, committed=committed, valid_from=valid_from)


def _one_per_request(**per_request: Tensor) -> None:
    lengths = {name: list(value.shape) for name, value in per_request.items()}
    if (
        any(len(shape) != 1 for shape in lengths.values())
        or len({*map(tuple, lengths.values())}) > 1
    ):
        raise ValueError(f"one value per request expected, got shapes {lengths}")


step_meta = op(reference.step_meta, check=_step_fits)
draft_meta = op(reference.draft_meta, check=_block_fits)
