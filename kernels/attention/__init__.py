"""Sparse latent attention over slot lists: decode, verify, draft and prefill."""

from torch import Tensor

from dspark.kernels.attention import reference
from dspark.kernels.attention.types import SlotList
from dspark.kernels.common.dispatch import op
from dspark.kernels.common.kv_pages import HEAD

__all__ = ["SlotList", "mla_sparse"]


def _rows_fit(
    q: Tensor, window: SlotList, compressed: SlotList | None, sink: Tensor, pos: Tensor
) -> None:
    rows = q.shape[0]
    if q.ndim != 3 or q.shape[2] != HEAD or sink.shape != q.shape[1:2]:
        raise ValueError(
            f"q must be [T, H, {HEAD}] with sink [H], got {list(q.shape)} and {list(sink.shape)}"
        )
    if pos.shape != (rows,):
        raise ValueError(f"pos must cover {rows} rows, got {list(pos.shape)}")
    for name, listed in (("window", window), ("compressed", compressed)):
        if listed is not None and (listed.idx.shape[0] != rows or listed.length.shape != (rows,)):
            raise ValueError(
                f"the {name} list must cover {rows} rows, got idx {list(listed.idx.shape)} and "
                f"length {list(listed.length.shape)}"
            )


mla_sparse = op(reference.mla_sparse, check=_rows_fit)
