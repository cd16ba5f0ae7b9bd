"""Rows of one rank of a model of 512-wide heads, their latents cut out of a wider projection."""

import torch

from dspark.kernels.qkv import kernel
from dspark.kernels.tooling.entries import Example, meta

ROWS, HEADS, PER_PAGE, EPS = 3, 8, 255, 1e-6


def _heads() -> torch.Tensor:
    return meta(torch.bfloat16, ROWS, HEADS, 512)


def _angles() -> tuple[torch.Tensor, torch.Tensor]:
    """cos_sin, pos."""
    return meta(torch.float32, 4096, 64), meta(torch.int64, ROWS)


def _latent() -> tuple[torch.Tensor, torch.Tensor]:
    """kv, norm_w."""
    return meta(torch.bfloat16, ROWS, 1536)[:, 1024:], meta(torch.bfloat16, 512)


def _slots() -> tuple[torch.Tensor, torch.Tensor, int]:
    """slot, pool, slots_per_page."""
    return meta(torch.int32, ROWS), meta(torch.uint8, 4, 149_504), PER_PAGE


def _q() -> None:
    kernel.q_norm_rope(_heads(), *_angles(), EPS)


def _o() -> None:
    kernel.inv_rope(_heads(), *_angles())


def _kv() -> None:
    kernel.kv_norm_rope_store(*_latent(), *_angles(), *_slots(), EPS)


def _q_and_kv() -> None:
    kernel.q_kv_prepare(_heads(), *_latent(), *_angles(), *_slots(), EPS)


EXAMPLES = [
    Example("q_norm_rope", kernel._q_norm_rope, _q),
    Example("inv_rope", kernel._inv_rope, _o),
    Example("kv_norm_rope_store", kernel._kv_norm_rope_store, _kv),
    Example("q_kv_prepare", kernel._q_kv_prepare, _q_and_kv),
]
