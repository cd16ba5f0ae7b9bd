"""K10, K11: query norm + RoPE, inverse RoPE of the output, window-KV norm + RoPE + paged store.

RoPE rotates interleaved pairs (2i, 2i+1) of the LAST 64 of 512 dims. `cos_sin` is f32
`[max_positions, 64]`, columns 0..31 cosines and 32..63 sines. Pools: see `pages`.
"""

import torch
from torch import Tensor

from dspark.kernels.common.dispatch import use_triton
from dspark.kernels.qkv import reference
from dspark.kernels.qkv.pages import HEAD, ROPE, load_slots, page_stride, store_slots

__all__ = [
    "inv_rope",
    "kv_norm_rope_store",
    "load_slots",
    "page_stride",
    "q_kv_prepare",
    "q_norm_rope",
    "store_slots",
]


def q_norm_rope(q: Tensor, cos_sin: Tensor, pos: Tensor, eps: float = 1e-6) -> Tensor:
    """Weightless RMS norm of each query head, then RoPE at the row's position.

    q: bf16 (served) or f32 (oracle) [T, H, 512]. pos: i64 [T]. Returns the same shape and dtype.
    Raises ValueError for another head width or a pos of another length.
    """
    _check_heads(q, cos_sin, pos)
    if use_triton(q):
        from dspark.kernels.qkv import kernel

        return kernel.q_norm_rope(q, cos_sin, pos, eps)
    return reference.q_norm_rope(q, cos_sin, pos, eps)


def inv_rope(o: Tensor, cos_sin: Tensor, pos: Tensor) -> Tensor:
    """Undo on the attention output the rotation that the values carried (K = V).

    o: [T, H, 512]. pos: i64 [T], the query's position. Returns the same shape and dtype.
    `mla_sparse` already applies it when given `cos_sin`. Raises ValueError as `q_norm_rope`.
    """
    _check_heads(o, cos_sin, pos)
    if use_triton(o):
        from dspark.kernels.qkv import kernel

        return kernel.inv_rope(o, cos_sin, pos)
    return reference.inv_rope(o, cos_sin, pos)


def kv_norm_rope_store(
    kv: Tensor,
    norm_w: Tensor,
    cos_sin: Tensor,
    pos: Tensor,
    loc: Tensor,
    pool: Tensor,
    slots_per_page: int,
    eps: float = 1e-6,
) -> None:
    """Weighted RMS norm of the latent, RoPE, store in the pool.

    kv: bf16 or f32 [T, 512], rows may be strided. norm_w: [512]. pos: i64 [T]. loc: i32 [T] slot,
    -1 = padded row, not stored. pool: uint8 packed or float32 plain, changed in place. Everything
    stays f32 until the store. Raises ValueError for a shape mismatch.
    """
    _check_latent(kv, pos, loc)
    if use_triton(kv):
        from dspark.kernels.qkv import kernel

        kernel.kv_norm_rope_store(kv, norm_w, cos_sin, pos, loc, pool, slots_per_page, eps)
        return
    reference.kv_norm_rope_store(kv, norm_w, cos_sin, pos, loc, pool, slots_per_page, eps)


def q_kv_prepare(
    q: Tensor,
    kv: Tensor,
    norm_w: Tensor,
    cos_sin: Tensor,
    pos: Tensor,
    loc: Tensor,
    pool: Tensor,
    slots_per_page: int,
    eps: float = 1e-6,
) -> Tensor:
    """`kv_norm_rope_store`, then `q_norm_rope`, in one launch: same arguments, result and errors.

    Returns the prepared query [T, H, 512].
    """
    _check_heads(q, cos_sin, pos)
    _check_latent(kv, pos, loc)
    if use_triton(q):
        from dspark.kernels.qkv import kernel

        return kernel.q_kv_prepare(q, kv, norm_w, cos_sin, pos, loc, pool, slots_per_page, eps)
    reference.kv_norm_rope_store(kv, norm_w, cos_sin, pos, loc, pool, slots_per_page, eps)
    return reference.q_norm_rope(q, cos_sin, pos, eps)


def _check_heads(x: Tensor, cos_sin: Tensor, pos: Tensor) -> None:
    if x.ndim != 3 or x.shape[2] != HEAD or pos.shape != x.shape[:1]:
        raise ValueError(
            f"heads must be [T, H, {HEAD}] with pos [T], got {list(x.shape)} and {list(pos.shape)}"
        )
    if cos_sin.dtype != torch.float32 or cos_sin.shape[1] != ROPE:
        raise ValueError(
            f"cos_sin must be f32 [max_positions, {ROPE}], "
            f"got {cos_sin.dtype} {list(cos_sin.shape)}"
        )


def _check_latent(kv: Tensor, pos: Tensor, loc: Tensor) -> None:
    rows = kv.shape[0]
    if kv.shape != (rows, HEAD) or pos.shape != (rows,) or loc.shape != (rows,):
        raise ValueError(
            f"kv must be [T, {HEAD}] with pos and loc [T], got {list(kv.shape)}, "
            f"{list(pos.shape)} and {list(loc.shape)}"
        )
