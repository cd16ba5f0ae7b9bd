"""Experts, all computed for every token: with four of them that beats gathering."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from dspark.bench.train_embedded.linear import Numerics, linear_f32
from dspark.bench.train_embedded.quantise import fp8_rows
from dspark.target.config import ModelConfig

Weights = dict[str, torch.Tensor]


class MoeResult(NamedTuple):
    y: torch.Tensor  # [..., D]
    load: torch.Tensor  # f32 [E] tokens routed to each expert


def moe(
    x: torch.Tensor,
    weights: Weights,
    preference: torch.Tensor,
    config: ModelConfig,
    numerics: Numerics,
) -> MoeResult:
    """x: [..., D]. preference: f32 [..., E], added to the scores for the choice only."""
    score = torch.sqrt(F.softplus(linear_f32(x, weights["ffn.gate"])))
    choice = (score + preference).detach().topk(config.num_experts_per_tok, dim=-1).indices
    chosen = torch.zeros_like(score).scatter_(-1, choice, 1.0)
    gate = score * chosen
    gate = gate / gate.sum(-1, keepdim=True) * config.routed_scaling_factor

    if numerics.rounding:
        x = fp8_rows(x, 128)
    w13, w2 = weights["ffn.experts.w13"], weights["ffn.experts.w2"]  # [E, 2I, D], [E, D, I]
    hidden = F.linear(x, w13.flatten(0, 1)).unflatten(-1, (len(w13), -1))  # [..., E, 2I]
    routed = _swiglu(hidden, gate[..., None], config.swiglu_limit, numerics)
    y = F.linear(routed.flatten(-2), w2.transpose(0, 1).flatten(1))
    hidden = F.linear(x, weights["ffn.shared_experts.w13"])
    shared = _swiglu(hidden, None, config.swiglu_limit, numerics)
    y = y + F.linear(shared, weights["ffn.shared_experts.w2"])
    return MoeResult(y, chosen.flatten(0, -2).sum(0))


def _swiglu(
    hidden: torch.Tensor, gate: torch.Tensor | None, limit: float, numerics: Numerics
) -> torch.Tensor:
    """[..., 2I], gate half first, to [..., I] with the limits of the served kernels."""
    a, b = hidden.float().chunk(2, dim=-1)
    h = F.silu(a.clamp(max=limit)) * b.clamp(-limit, limit)
    if gate is not None:
        h = h * gate
    h = h.to(hidden.dtype)
    return fp8_rows(h, 128) if numerics.rounding else h


def hash_preference(tid2eid: torch.Tensor, experts: int) -> torch.Tensor:
    """i64 [V, k] to f32 [V, E]: large enough that the listed experts are always chosen."""
    return torch.zeros(len(tid2eid), experts, device=tid2eid.device).scatter_(1, tid2eid, 1e4)
