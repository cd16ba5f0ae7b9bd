"""The lightning indexer, which picks the C4 entries a query attends to.

score(t, j) = sum_h weight[t, h] * relu(q[t, h] . key[j]) over visible entries j; the k largest
win, ties go to the lower index, the list comes out ascending. Query and keys are e4m3 after an
orthonormal Hadamard rotation (served) or unrounded f32 (oracle).
"""

from torch import Tensor

from dspark.kernels.common.dispatch import op
from dspark.kernels.common.index_pages import WIDTH
from dspark.kernels.indexer import reference
from dspark.kernels.indexer.types import IndexQuery, TopK

__all__ = ["IndexQuery", "TopK", "index_logits", "index_q", "index_select", "index_topk"]


def _heads_fit(q: Tensor, w: Tensor, pos: Tensor) -> None:
    if q.ndim != 3 or q.shape[2] != WIDTH or w.shape != q.shape[:2] or pos.shape != q.shape[:1]:
        raise ValueError(
            f"index_q needs q [T, Hi, {WIDTH}], w [T, Hi] and pos [T], got {list(q.shape)}, "
            f"{list(w.shape)} and {list(pos.shape)}"
        )


def _query_fits(query: IndexQuery, row_req: Tensor, c4_len: Tensor) -> None:
    _rows_fit(row_req, c4_len, rows=query.q.shape[0])


def _scores_fit(logits: Tensor, c4_len: Tensor, row_req: Tensor, k: int) -> None:
    _rows_fit(row_req, c4_len, rows=logits.shape[0])
    if k < 1:
        raise ValueError(f"index_topk needs k >= 1, got {k}")


def _choice_fits(query: IndexQuery, row_req: Tensor, c4_len: Tensor, k: int) -> None:
    _query_fits(query, row_req, c4_len)
    if k < 1:
        raise ValueError(f"index_select needs k >= 1, got {k}")


def _rows_fit(row_req: Tensor, c4_len: Tensor, *, rows: int) -> None:
    if row_req.shape != (rows,) or c4_len.shape != (rows,):
        raise ValueError(
            f"row_req and c4_len must have shape [{rows}], got {list(row_req.shape)} and "
            f"{list(c4_len.shape)}"
        )


index_q = op(reference.index_q, check=_heads_fit)
index_logits = op(reference.index_logits, check=_query_fits)
index_topk = op(reference.index_topk, check=_scores_fit)
index_select = op(reference.index_select, check=_choice_fits)
