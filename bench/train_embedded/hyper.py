"""Hyper-connections: four residual streams, mixed around every sublayer."""

from typing import NamedTuple

import torch

from dspark.bench.train_embedded.linear import linear_f32
from dspark.bench.train_embedded.sinkhorn import sinkhorn
from dspark.target.config import ModelConfig

Weights = dict[str, torch.Tensor]


class Mix(NamedTuple):
    pre: torch.Tensor  # f32 [..., 4] weights of the streams in the sublayer's input
    post: torch.Tensor  # f32 [..., 4] weight of the sublayer's output in each stream
    comb: torch.Tensor  # f32 [..., 4, 4] from stream (first) to stream (second)


def mix(x: torch.Tensor, weights: Weights, site: str, config: ModelConfig) -> Mix:
    """x: [..., 4, D]. site: prefix of the `_fn`, `_base` and `_scale` tensors."""
    z = _gates(x, weights[f"{site}_fn"], config)
    base, scale = weights[f"{site}_base"], weights[f"{site}_scale"]
    pre = torch.sigmoid(z[..., :4] * scale[0] + base[:4]) + config.hc_eps
    post = 2 * torch.sigmoid(z[..., 4:8] * scale[1] + base[4:8])
    logits = z[..., 8:] * scale[2] + base[8:]
    comb = sinkhorn(logits.reshape(-1, 4, 4), config.hc_sinkhorn_iters, config.hc_eps)
    return Mix(pre, post, comb.view(*z.shape[:-1], 4, 4))


def sublayer_input(x: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """[..., 4, D] streams to [..., D]."""
    return (pre[..., None] * x).sum(-2).to(x.dtype)


def update(x: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor):
    """New streams [..., 4, D] from the old ones and the sublayer's output y [..., D]."""
    mixed = post[..., None] * y[..., None, :]
    for j in range(4):
        mixed = mixed + comb[..., j, :, None] * x[..., j, None, :]
    return mixed.to(x.dtype)


def head(x: torch.Tensor, weights: Weights, config: ModelConfig) -> torch.Tensor:
    """Streams [..., 4, D] to the final hidden state [..., D], before its norm."""
    z = _gates(x, weights["hc_head_fn"], config)
    gate = torch.sigmoid(z * weights["hc_head_scale"] + weights["hc_head_base"])
    return sublayer_input(x, gate + config.hc_eps)


def _gates(x: torch.Tensor, fn: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    flat = x.flatten(-2).float()
    norm = torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    return linear_f32(flat, fn) * norm
