"""Query norm and RoPE, window latent norm, RoPE and store, and the inverse RoPE of the output.

RoPE rotates the LAST 64 of 512 dims (`dspark.kernels.common.norm_rope`). The pools are laid out as
`dspark.kernels.common.kv_pages` says.
"""

import torch
from torch import Tensor

from dspark.kernels.common.dispatch import op
from dspark.kernels.common.kv_pages import HEAD
from dspark.kernels.common.norm_rope import ROPE
from dspark.kernels.qkv import reference

__all__ = ["inv_rope", "kv_norm_rope_store", "q_kv_prepare", "q_norm_rope"]


def _heads_fit(q: Tensor, cos_sin: Tensor, pos: Tensor) -> None:
    if q.ndim != 3 or q.shape[2] != HEAD or pos.shape != q.shape[:1]:
        raise ValueError(
            f"heads must be [T, H, {HEAD}] with pos [T], got {list(q.shape)} and {list(pos.shape)}"
        )
    if cos_sin.dtype != torch.float32 or cos_sin.shape[1] != ROPE:
        raise ValueError(
            f"cos_sin must be f32 [max_positions, {ROPE}], "
            f"got {cos_sin.dtype} {list(cos_sin.shape)}"
        )


def _output_fits(o: Tensor, cos_sin: Tensor, pos: Tensor) -> None:
    _heads_fit(o, cos_sin, pos)


def _latent_fits(kv: Tensor, pos: Tensor, slot: Tensor) -> None:
    rows = kv.shape[0]
    if kv.shape != (rows, HEAD) or pos.shape != (rows,) or slot.shape != (rows,):
        raise ValueError(
            f"kv must be [T, {HEAD}] with pos and slot [T], got {list(kv.shape)}, "
            f"{list(pos.shape)} and {list(slot.shape)}"
        )


def _heads_and_latent_fit(
    q: Tensor, kv: Tensor, cos_sin: Tensor, pos: Tensor, slot: Tensor
) -> None:
    _heads_fit(q, cos_sin, pos)
    _latent_fits(kv, pos, slot)


q_norm_rope = op(reference.q_norm_rope, check=_heads_fit)
inv_rope = op(reference.inv_rope, check=_output_fits)
kv_norm_rope_store = op(reference.kv_norm_rope_store, check=_latent_fits)
q_kv_prepare = op(reference.q_kv_prepare, check=_heads_and_latent_fit)
