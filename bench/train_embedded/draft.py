"""The DSpark draft: blocks of gamma rows at many anchors of every sequence at once.

An anchor L is the position of a block's bonus token: the draft sees the target's captures at
positions before L, the bonus token itself, and proposes the tokens of L+1 .. L+gamma.
"""

from typing import NamedTuple

import torch

from dspark.bench.train_embedded import hyper
from dspark.bench.train_embedded.attention import MASKED, Rope, Ropes, keys, output, queries
from dspark.bench.train_embedded.config import dspark_of
from dspark.bench.train_embedded.linear import Numerics, linear_f32, linear_fp8, rms_norm
from dspark.bench.train_embedded.parameters import below
from dspark.bench.train_embedded.target import embed_streams, ffn_site
from dspark.target.config import ModelConfig

Weights = dict[str, torch.Tensor]


class DraftResult(NamedTuple):
    hidden: torch.Tensor  # [B, A, gamma, D], before the final norm
    base: torch.Tensor  # f32 [B, A, gamma, V] logits without the Markov bias
    loads: list[torch.Tensor]  # f32 [E] per stage


def project_captures(
    weights: Weights, captures: torch.Tensor, config: ModelConfig, numerics: Numerics
) -> torch.Tensor:
    """[B, N, captured layers * D] to the input [B, N, D] of every stage's context keys."""
    u = linear_fp8(captures, weights["mtp.0.main_proj"], numerics)
    return rms_norm(u, weights["mtp.0.main_norm"], config.rms_norm_eps)


def run_draft(
    weights: Weights,
    shared: Weights,
    captures: torch.Tensor,
    bonus: torch.Tensor,
    anchors: torch.Tensor,
    ropes: Ropes,
    config: ModelConfig,
    numerics: Numerics,
    run_stage=None,
) -> DraftResult:
    """Run the blocks of all anchors.

    Args:
        weights: prepared draft tensors; shared: prepared target tensors (`embed`, `head`).
        captures: [B, N, captured layers * D] of the target.
        bonus: i64 [B, A] token at each anchor.
        anchors: i64 [B, A].
    """
    dspark = dspark_of(config)
    rows = torch.arange(dspark.block_size, device=bonus.device)
    noise = torch.full_like(bonus, dspark.noise_token_id)[..., None]
    ids = torch.where(rows == 0, bonus[..., None], noise)  # [B, A, gamma]
    x = embed_streams(shared, ids)
    if torch.is_grad_enabled():
        x.requires_grad_()  # as in the later stages: one compiled variant serves all
    u = project_captures(weights, captures, config, numerics)
    context_rope = Rope(*(table[: u.shape[1]] for table in ropes.plain))
    block_rope = ropes.plain.at(anchors[..., None] + rows)
    position = torch.arange(u.shape[1], device=u.device)
    last = anchors[..., None]
    seen = (position < last) & (position >= last - config.sliding_window)  # [B, A, N]
    loads = []
    for number in range(dspark.stages):
        own = below(weights, f"mtp.{number}.")
        bias = own.pop("ffn.gate.bias")
        x, load = (run_stage or stage)(
            x,
            u,
            {n: own[n] for n in STAGE_TENSORS},
            bias,
            seen,
            context_rope,
            block_rope,
            config,
            numerics,
        )
        loads.append(load)
    final = below(weights, f"mtp.{dspark.stages - 1}.")
    hidden = hyper.head(x, final, config)
    normed = rms_norm(hidden, final["norm"], config.rms_norm_eps)
    return DraftResult(hidden, linear_f32(normed, shared["head"]), loads)


# Without the extras of the first and last stage, so that all stages run the same compiled code.
STAGE_TENSORS = (
    "attn_norm", "ffn_norm",
    "hc_attn_fn", "hc_attn_base", "hc_attn_scale", "hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale",
    "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b",
    "attn.q_norm", "attn.kv_norm", "attn.attn_sink",
    "ffn.gate", "ffn.experts.w13", "ffn.experts.w2", "ffn.shared_experts.w13",
    "ffn.shared_experts.w2",
)  # fmt: skip


def stage(
    x: torch.Tensor,
    u: torch.Tensor,
    weights: Weights,
    bias: torch.Tensor,
    seen: torch.Tensor,
    context_rope: Rope,
    block_rope: Rope,
    config: ModelConfig,
    numerics: Numerics,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One stage over all blocks x [B, A, gamma, 4, D]; (streams, load f32 [E])."""
    mix = hyper.mix(x, weights, "hc_attn", config)
    inner = hyper.sublayer_input(x, mix.pre)
    inner = rms_norm(inner, weights["attn_norm"], config.rms_norm_eps)
    q = queries(inner, weights, block_rope, config, numerics).heads  # [B, A, gamma, H, 512]
    context = keys(u, weights, context_rope, config, numerics)  # [B, N, 512]
    own = keys(inner, weights, block_rope, config, numerics)  # [B, A, gamma, 512]
    o = attend_blocks(q, context, own, seen, weights["attn.attn_sink"])
    x = hyper.update(x, output(o, weights, block_rope, config, numerics), mix.post, mix.comb)
    return ffn_site(x, weights, bias.expand(*x.shape[:-2], -1), config, numerics)


def attend_blocks(
    q: torch.Tensor,
    context: torch.Tensor,
    own: torch.Tensor,
    seen: torch.Tensor,
    sink: torch.Tensor,
) -> torch.Tensor:
    """Every row of a block sees the block's window and all rows of the block.

    q: [B, A, G, H, 512]; context: [B, N, 512]; own: [B, A, G, 512]; seen: bool [B, A, N].
    """
    batch, anchors, rows, heads, width = q.shape
    scale = width**-0.5
    far = (q.flatten(1, 3) @ context.transpose(-1, -2)).float() * scale
    far = far.view(batch, anchors, rows, heads, -1)
    far = far.masked_fill(~seen[:, :, None, None], MASKED)
    near = (q.flatten(2, 3) @ own.transpose(-1, -2)).float() * scale
    near = near.view(batch, anchors, rows, heads, rows)
    sinks = sink.view(1, 1, 1, heads, 1).expand(batch, anchors, rows, heads, 1)
    p = torch.cat((near, sinks, far), dim=-1).softmax(-1).to(q.dtype)
    o = (p[..., :rows].flatten(2, 3) @ own).view_as(q)
    return o + (p[..., rows + 1 :].flatten(1, 3) @ context).view_as(q)


class Heads(NamedTuple):
    """The sequential part, shared by training and chains of proposals."""

    logits: torch.Tensor  # f32 [..., V]
    confidence: torch.Tensor  # f32 [...], a logit


def markov_heads(
    weights: Weights, result: DraftResult, previous: torch.Tensor, row: slice | int
) -> Heads:
    """Final logits and confidence of block rows `row`, given each row's previous token.

    previous: i64 [B, A] for one row, [B, A, rows] for a slice.
    """
    last = max(n for n in weights if n.startswith("mtp."))
    prefix = ".".join(last.split(".")[:2])
    embedded = weights[f"{prefix}.markov_head.markov_w1"][previous]
    bias = linear_f32(embedded, weights[f"{prefix}.markov_head.markov_w2"])
    joined = torch.cat((result.hidden[:, :, row].float(), embedded.float()), dim=-1)
    confidence = linear_f32(joined, weights[f"{prefix}.confidence_head.proj"])
    return Heads(result.base[:, :, row] + bias, confidence[..., 0])
