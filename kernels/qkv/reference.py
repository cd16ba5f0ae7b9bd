"""Torch reference of the query and latent ops; also the CPU production path.

Every reduction runs in f64 and is rounded once, so a row's bits never depend on the other rows.
"""

import torch
from torch import Tensor

from dspark.kernels.common.kv_pages import NOPE, store_slots
from dspark.kernels.common.norm_rope import rms_scale, rotate, rotation


def q_norm_rope(q: Tensor, cos_sin: Tensor, pos: Tensor, eps: float = 1e-6) -> Tensor:
    """Weightless RMS norm of each query head, then RoPE at the row's position.

    q: bf16 (served) or f32 (oracle) [T, H, 512]. pos: i64 [T]. Returns the same shape and dtype.
    Raises ValueError for another head width or a pos of another length.
    """
    x = q.double()
    # Served arithmetic rounds the normed query before it is rotated (a no-op for f32 oracles).
    normed = (x * rms_scale(x, eps)).to(q.dtype)
    rope = normed[..., NOPE:].double()
    normed[..., NOPE:] = rotate(rope, rotation(cos_sin, pos)[:, None]).to(q.dtype)
    return normed


def inv_rope(o: Tensor, cos_sin: Tensor, pos: Tensor) -> Tensor:
    """Undo on the attention output the rotation that the values carried (K = V).

    o: [T, H, 512]. pos: i64 [T], the query's position. Returns the same shape and dtype.
    `mla_sparse` already applies it when given `cos_sin`. Raises ValueError as `q_norm_rope`.
    """
    rope = o[..., NOPE:].double()
    back = rotate(rope, rotation(cos_sin, pos).conj()[:, None]).to(o.dtype)
    return torch.cat([o[..., :NOPE], back], -1)


def kv_norm_rope_store(
    kv: Tensor,
    norm_w: Tensor,
    cos_sin: Tensor,
    pos: Tensor,
    slot: Tensor,
    pool: Tensor,
    slots_per_page: int,
    eps: float = 1e-6,
) -> None:
    """Weighted RMS norm of the latent, RoPE, store in the pool.

    kv: bf16 or f32 [T, 512], rows may be strided. norm_w: [512]. pos: i64 [T]. slot: i32 [T] slot,
    -1 = padded row, not stored. pool: uint8 packed or float32 plain, changed in place. Everything
    stays f32 until the store. Raises ValueError for a shape mismatch.
    """
    x = kv.double()
    x = x * rms_scale(x, eps) * norm_w.double()
    x[:, NOPE:] = rotate(x[:, NOPE:], rotation(cos_sin, pos))
    store_slots(pool, slots_per_page, slot, x.float())


def q_kv_prepare(
    q: Tensor,
    kv: Tensor,
    norm_w: Tensor,
    cos_sin: Tensor,
    pos: Tensor,
    slot: Tensor,
    pool: Tensor,
    slots_per_page: int,
    eps: float = 1e-6,
) -> Tensor:
    """`kv_norm_rope_store`, then `q_norm_rope`, in one launch: same arguments, result and errors.

    Returns the prepared query [T, H, 512].
    """
    kv_norm_rope_store(kv, norm_w, cos_sin, pos, slot, pool, slots_per_page, eps)
    return q_norm_rope(q, cos_sin, pos, eps)
