"""The addresses one forward needs, computed once and shared by all layers.

Every tensor has a static shape; counts live on the device. Padded rows carry position 0,
`row_req` -1, every slot -1 and every length 0, so that writers skip them and
readers see empty lists.
"""

from torch import Tensor

from dspark.kernels.common.dispatch import op
from dspark.kernels.step import reference
from dspark.kernels.step.types import (
    BatchRows,
    BlockRows,
    Bounds,
    DraftMeta,
    Rings,
    StepMeta,
    Tables,
    empty_draft_meta,
    empty_step_meta,
)

__all__ = [
    "BatchRows",
    "BlockRows",
    "Bounds",
    "DraftMeta",
    "Rings",
    "StepMeta",
    "Tables",
    "draft_meta",
    "empty_draft_meta",
    "empty_step_meta",
    "step_meta",
]


def _step_fits(rows: BatchRows, bounds: Bounds, rings: Rings) -> None:
    requests, width, page = rows.request_slot.shape[0], rows.width, bounds.page
    _one_per_request(request_slot=rows.request_slot, committed=rows.committed, run=rows.run)
    if width is not None and rows.total != requests * width:
        raise ValueError(f"{requests} requests of {width} rows are not {rows.total} rows")
    if page % 128:
        raise ValueError(f"page must be a multiple of 128 tokens, got {page}")
    if rings.c4 < 8 or rings.c4 % 4 or page % rings.c4:
        raise ValueError(
            f"a C4 ring must be >= 8, a multiple of 4 and divide the page {page}, got {rings.c4}"
        )
    if rings.c128 < 128:
        raise ValueError(f"a C128 ring must be >= 128, got {rings.c128}")


def _block_fits(rows: BlockRows, window: int) -> None:
    if rows.gamma < 1 or window < 1:
        raise ValueError(f"draft_meta needs gamma and window >= 1, got {rows.gamma} and {window}")
    _one_per_request(
        request_slot=rows.request_slot, committed=rows.committed, valid_from=rows.valid_from
    )


def _one_per_request(**per_request: Tensor) -> None:
    lengths = {name: list(value.shape) for name, value in per_request.items()}
    if (
        any(len(shape) != 1 for shape in lengths.values())
        or len({*map(tuple, lengths.values())}) > 1
    ):
        raise ValueError(f"one value per request expected, got shapes {lengths}")


step_meta = op(reference.step_meta, check=_step_fits)
draft_meta = op(reference.draft_meta, check=_block_fits)
