"""The target over whole sequences."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from dspark.bench.train_embedded import hyper
from dspark.bench.train_embedded.attention import (
    Ropes,
    attend_sequence,
    keys,
    output,
    queries,
    sequence_entries,
)
from dspark.bench.train_embedded.config import dspark_of
from dspark.bench.train_embedded.linear import Numerics, linear_f32, rms_norm
from dspark.bench.train_embedded.moe import hash_preference, moe
from dspark.bench.train_embedded.parameters import below
from dspark.target.config import ModelConfig

Weights = dict[str, torch.Tensor]


class BlockResult(NamedTuple):
    x: torch.Tensor  # [B, N, 4, D]
    load: torch.Tensor  # f32 [E]
    index_loss: torch.Tensor  # f32 scalar


class TargetResult(NamedTuple):
    hidden: torch.Tensor  # [B, N, D], final norm applied
    captures: torch.Tensor  # [B, N, captured layers * D]
    loads: list[torch.Tensor]  # f32 [E] per layer
    index_loss: torch.Tensor  # f32 scalar, summed over C4 layers


def block(
    x: torch.Tensor,
    weights: Weights,
    preference: torch.Tensor,
    ropes: Ropes,
    dense: torch.Tensor,
    ratio: int,
    config: ModelConfig,
    numerics: Numerics,
) -> BlockResult:
    """One layer. x: [B, N, 4, D]; preference: f32 [B, N, E]; dense: see `sequence_entries`."""
    table = ropes.of(ratio)
    rope = table._replace(cos=table.cos[: x.shape[1]], sin=table.sin[: x.shape[1]])
    mix = hyper.mix(x, weights, "hc_attn", config)
    inner = hyper.sublayer_input(x, mix.pre)
    inner = rms_norm(inner, weights["attn_norm"], config.rms_norm_eps)
    latent, q = queries(inner, weights, rope, config, numerics)
    kv = keys(inner, weights, rope, config, numerics)
    entries = None
    index_loss = inner.new_zeros((), dtype=torch.float32)
    if ratio:
        entries = sequence_entries(inner, latent, q, weights, rope, ratio, dense, config, numerics)
        index_loss = entries.index_loss
    o = attend_sequence(q, kv, weights["attn.attn_sink"], config.sliding_window, entries)
    x = hyper.update(x, output(o, weights, rope, config, numerics), mix.post, mix.comb)

    x, load = ffn_site(x, weights, preference, config, numerics)
    return BlockResult(x, load, index_loss)


def ffn_site(
    x: torch.Tensor,
    weights: Weights,
    preference: torch.Tensor,
    config: ModelConfig,
    numerics: Numerics,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The expert half of a block: (streams [..., 4, D], load f32 [E])."""
    mix = hyper.mix(x, weights, "hc_ffn", config)
    inner = rms_norm(hyper.sublayer_input(x, mix.pre), weights["ffn_norm"], config.rms_norm_eps)
    result = moe(inner, weights, preference, config, numerics)
    return hyper.update(x, result.y, mix.post, mix.comb), result.load


def expert_preference(weights: Weights, ids: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """f32 [..., E] added to the scores when a block chooses experts for the tokens `ids`."""
    if "ffn.gate.tid2eid" in weights:
        return hash_preference(weights["ffn.gate.tid2eid"], config.n_routed_experts)[ids]
    return weights["ffn.gate.bias"].expand(*ids.shape, -1).contiguous()


def routing_free(weights: Weights) -> Weights:
    """Without the routing tensors, so that hash and scored layers run the same compiled code."""
    return {n: t for n, t in weights.items() if n not in ("ffn.gate.tid2eid", "ffn.gate.bias")}


def run_target(
    weights: Weights,
    ids: torch.Tensor,
    ropes: Ropes,
    config: ModelConfig,
    numerics: Numerics,
    *,
    dense: torch.Tensor,
    run_block: Callable[..., BlockResult] = block,
) -> TargetResult:
    """ids: i64 [B, N], N a multiple of 128, positions from 0. weights: prepared."""
    x = embed_streams(weights, ids)
    captures, loads, index_losses = [], [], []
    for layer, ratio in enumerate(config.compress_ratios):
        own = below(weights, f"layers.{layer}.")
        preference = expert_preference(own, ids, config)
        result = run_block(x, routing_free(own), preference, ropes, dense, ratio, config, numerics)
        x = result.x
        loads.append(result.load)
        index_losses.append(result.index_loss)
        if layer in dspark_of(config).target_layer_ids:
            captures.append(x.float().mean(2).to(x.dtype))
    hidden = rms_norm(hyper.head(x, weights, config), weights["norm"], config.rms_norm_eps)
    return TargetResult(hidden, torch.cat(captures, -1), loads, torch.stack(index_losses).sum())


def embed_streams(weights: Weights, ids: torch.Tensor) -> torch.Tensor:
    """[..., ] to four identical streams [..., 4, D]."""
    return weights["embed"][ids].unsqueeze(-2).expand(*ids.shape, 4, -1).contiguous()


def logits(hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
    """f32 [..., V] of normed hidden states."""
    return linear_f32(hidden, weights["head"])
