"""K18, K19: sparse latent attention over slot lists: decode, verify, draft and prefill."""

from torch import Tensor

from dspark.kernels.common.dispatch import use_triton
from dspark.kernels.qkv.pages import HEAD

__all__ = ["mla_sparse"]


def mla_sparse(
    q: Tensor,
    swa_pool: Tensor,
    swa_n: int,
    swa_idx: Tensor,
    swa_len: Tensor,
    x_pool: Tensor | None,
    x_n: int,
    x_idx: Tensor | None,
    x_len: Tensor | None,
    sink: Tensor,
    scale: float,
    cos_sin: Tensor | None,
    pos: Tensor,
    *,
    few_rows: bool | None = None,
) -> Tensor:
    """Attend each row to its window slots, then to its compressed entries.

    o = sum_j p_j k_j with p = softmax over both lists and a per-head sink logit that counts in the
    denominator only; the slot is key and value at once.

    Args:
        q: bf16 (served) or f32 (oracle) [T, H, 512], any number of heads.
        swa_pool, swa_n: window pool and its slots per page (`dspark.kernels.qkv.pages`).
        swa_idx: i32 [T, A] slots, any A; -1 entries are skipped. swa_len: i32 [T].
        x_pool, x_n, x_idx, x_len: the same for the compressed list, or None, 0, None, None.
        sink: f32 [H], not scaled. scale: applied to q . k.
        cos_sin: f32 [max_positions, 64] undoes the values' rotation at `pos` i64 [T]; None skips.
        few_rows: True for decode, verify and draft blocks, be they of many requests: the host waits
            for nothing. False for prompts, be they short. Either way a row has the same bits in
            every batch, but the two differ in rounding. None chooses by T.

    Returns:
        [T, H, 512] in q's dtype; a row with empty lists is 0.

    Raises:
        ValueError: for shapes that disagree.
    """
    rows = q.shape[0]
    if q.ndim != 3 or q.shape[2] != HEAD or sink.shape != q.shape[1:2]:
        raise ValueError(
            f"q must be [T, H, {HEAD}] with sink [H], got {list(q.shape)} and {list(sink.shape)}"
        )
    if swa_idx.shape[0] != rows or swa_len.shape != (rows,) or pos.shape != (rows,):
        raise ValueError(
            f"swa_idx, swa_len and pos must cover {rows} rows, got {list(swa_idx.shape)}, "
            f"{list(swa_len.shape)} and {list(pos.shape)}"
        )
    if (x_pool is None) != (x_idx is None) or (x_idx is None) != (x_len is None):
        raise ValueError("x_pool, x_idx and x_len must be given together")
    if x_idx is not None and x_idx.shape[0] != rows:
        raise ValueError(f"x_idx must cover {rows} rows, got {list(x_idx.shape)}")
    lists = (swa_pool, swa_n, swa_idx, swa_len, x_pool, x_n, x_idx, x_len)
    if use_triton(q):
        from dspark.kernels.attention import kernel

        return kernel.mla_sparse(q, *lists, sink, scale, cos_sin, pos, few_rows)
    from dspark.kernels.attention import reference

    return reference.mla_sparse(q, *lists, sink, scale, cos_sin, pos)
