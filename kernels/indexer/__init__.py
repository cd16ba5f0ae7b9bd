"""K15-K17: the lightning indexer, which picks the C4 entries a query attends to.

score(t, j) = sum_h weight[t, h] * relu(q[t, h] . key[j]) over visible entries j; the k largest
win, ties go to the lower index, the list comes out ascending. Query and keys are e4m3 after an
orthonormal Hadamard rotation (served) or unrounded f32 (oracle).
"""

from torch import Tensor

from dspark.kernels.common.dispatch import use_triton
from dspark.kernels.indexer import reference
from dspark.kernels.indexer.pages import WIDTH
from dspark.kernels.indexer.types import IndexQuery, TopK

__all__ = ["IndexQuery", "TopK", "index_logits", "index_q", "index_select", "index_topk"]


def index_q(q: Tensor, w: Tensor, cos_sin: Tensor, pos: Tensor) -> IndexQuery:
    """Prepare index queries: RoPE on the last 64 dims, Hadamard, e4m3, scales folded into w.

    q: bf16 (served) or f32 (oracle) [T, Hi, 128]. w: [T, Hi] head weights, rounded to q's
    dtype. cos_sin: f32 [max_positions, 64]. pos: i64 [T]. Raises ValueError for shapes that
    disagree.
    """
    if q.ndim != 3 or q.shape[2] != WIDTH or w.shape != q.shape[:2] or pos.shape != q.shape[:1]:
        raise ValueError(
            f"index_q needs q [T, Hi, {WIDTH}], w [T, Hi] and pos [T], got {list(q.shape)}, "
            f"{list(w.shape)} and {list(pos.shape)}"
        )
    if use_triton(q):
        from dspark.kernels.indexer import kernel

        return kernel.index_q(q, w, cos_sin, pos)
    return reference.index_q(q, w, cos_sin, pos)


def index_logits(
    query: IndexQuery,
    pool: Tensor,
    page_table: Tensor,
    row_req: Tensor,
    c4_len: Tensor,
    c_max: int,
) -> Tensor:
    """f32 [T, c_max] index scores; -inf from the row's visible length on.

    pool: index pool (`pages`). page_table: i32 [R, max_pages], entry j of request r is key j % 64
    of page page_table[r, j // 64]. row_req: i32 [T], -1 = padded. c4_len: i32 [T] visible entries,
    <= c_max. Raises ValueError for shapes that disagree.
    """
    _check_rows(row_req, c4_len, rows=query.q.shape[0])
    if use_triton(query.q):
        from dspark.kernels.indexer import kernel

        return kernel.index_logits(query, pool, page_table, row_req, c4_len, c_max)
    return reference.index_logits(query, pool, page_table, row_req, c4_len, c_max)


def index_topk(logits: Tensor, c4_len: Tensor, page_table: Tensor, row_req: Tensor, k: int) -> TopK:
    """The k largest scores of each row: exact, ties to the lower index, ascending, -1 tail.

    NaN counts as -inf, so that it is chosen last and disturbs no other row.

    logits: f32 [T, C] from `index_logits`. Rows with c4_len <= k take every visible entry.
    Raises ValueError when k < 1 or shapes disagree.
    """
    _check_rows(row_req, c4_len, rows=logits.shape[0])
    if k < 1:
        raise ValueError(f"index_topk needs k >= 1, got {k}")
    if use_triton(logits):
        from dspark.kernels.indexer import kernel

        return kernel.index_topk(logits, c4_len, page_table, row_req, k)
    return reference.index_topk(logits, c4_len, page_table, row_req, k)


def index_select(
    query: IndexQuery,
    pool: Tensor,
    page_table: Tensor,
    row_req: Tensor,
    c4_len: Tensor,
    c_max: int,
    k: int,
) -> TopK:
    """`index_topk(index_logits(...))` with bounded temporaries, however long the prefill.

    Skips the scores where c_max <= k: every visible entry is chosen anyway. Same arguments, same
    result, same errors.
    """
    _check_rows(row_req, c4_len, rows=query.q.shape[0])
    if k < 1:
        raise ValueError(f"index_select needs k >= 1, got {k}")
    if use_triton(query.q):
        from dspark.kernels.indexer import kernel

        return kernel.index_select(query, pool, page_table, row_req, c4_len, c_max, k)
    return reference.index_select(query, pool, page_table, row_req, c4_len, k)


def _check_rows(row_req: Tensor, c4_len: Tensor, *, rows: int) -> None:
    if row_req.shape != (rows,) or c4_len.shape != (rows,):
        raise ValueError(
            f"row_req and c4_len must have shape [{rows}], got {list(row_req.shape)} and "
            f"{list(c4_len.shape)}"
        )
