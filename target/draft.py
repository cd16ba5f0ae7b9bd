"""The DSpark draft in plain PyTorch: what the target saw goes in, a block of guesses comes out.

The draft keeps no history of its own. Every committed token leaves one latent per stage in the
draft's window pool, computed from the target's hidden states of that token (`inject`). A block
then attends to the latents of the last 128 tokens and to itself, all rows seeing all rows.
It knows nothing of SGLang; `dspark.host.models.draft` wraps it for the server.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dspark.kernels.linear import Bf16Weight, bf16_linear, fp8_linear, rms_norm
from dspark.kernels.qkv import kv_norm_rope_store
from dspark.kernels.step import DraftMeta
from dspark.target import attention
from dspark.target.attention import LayerView, WindowRows
from dspark.target.block import Site, block_sites, collapse_streams, through_sites
from dspark.target.caches import PAGE_TOKENS, LayerCaches
from dspark.target.config import ModelConfig
from dspark.target.weights import AttentionWeights, DraftWeights


class DraftForward(NamedTuple):
    """Rows, table and memory of one block forward; made once, read by every stage."""

    meta: DraftMeta
    rope: torch.Tensor  # [maxpos, 64] f32 plain table; the draft never uses YaRN
    caches: Sequence[LayerCaches]  # one per stage, updated in place


class DraftOutput(NamedTuple):
    hidden: torch.Tensor  # [R * gamma, hidden] before the final norm: the confidence head's input
    logits: torch.Tensor  # f32 [R * gamma, vocab shard] before Markov refinement


def block_ids(bonus: torch.Tensor, gamma: int, noise_token_id: int) -> torch.Tensor:
    """i64 [R] -> i64 [R * gamma]: the last emitted token of each request, then noise tokens."""
    ids = bonus.new_full((bonus.shape[0], gamma), noise_token_id)
    ids[:, 0] = bonus
    return ids.flatten()


def project(captures: torch.Tensor, w: DraftWeights, config: ModelConfig) -> torch.Tensor:
    """[T, layers * hidden] target hidden states -> [T, hidden], shared by all stages."""
    return rms_norm(fp8_linear(captures, w.main_proj), w.main_norm, config.rms_norm_eps)


def inject(
    captures: torch.Tensor,
    window_slot: torch.Tensor,
    pos: torch.Tensor,
    w: DraftWeights,
    config: ModelConfig,
    rope: torch.Tensor,
    caches: Sequence[LayerCaches],
) -> None:
    """Store the draft latents of tokens the target has run and the request keeps.

    Args:
        captures: [T, layers * hidden] outputs of the captured target layers, ascending layer.
        window_slot: i32 [T] window slot of each token; -1 leaves it out (padding, rejected drafts).
        pos: i64 [T].
        rope: [maxpos, 64] f32 plain table; the draft never uses YaRN.
        caches: one per stage, updated in place.
    """
    if captures.shape[0] == 0:
        return
    seen = project(captures, w, config)
    for stage, cache in zip(w.blocks, caches, strict=True):
        kv_norm_rope_store(
            fp8_linear(seen, stage.attn.wkv),
            stage.attn.kv_norm,
            rope,
            pos,
            window_slot,
            cache.window,
            PAGE_TOKENS,
            config.rms_norm_eps,
        )


def run_block(
    embedded: torch.Tensor,
    token_ids: torch.Tensor,
    w: DraftWeights,
    head: Bf16Weight,
    config: ModelConfig,
    forward: DraftForward,
    group=None,
) -> DraftOutput:
    """Run the block rows through all stages.

    Args:
        embedded: [R * gamma, hidden] target embeddings of `token_ids` (`block_ids`).
        head: the target's vocabulary head, this rank's shard.
        group: tensor-parallel process group or None.
    """
    meta = forward.meta
    token_ids = torch.where(meta.length == 0, -1, token_ids)  # padded rows choose no experts
    rows = WindowRows(meta.pos, meta.window_slot, meta.seen, meta.length, running=True)
    sites: list[Site] = []
    for stage, cache in zip(w.blocks, forward.caches, strict=True):

        def attend(x, attn: AttentionWeights = stage.attn, cache: LayerCaches = cache):
            latent, kv = attention.project(x, attn, config)
            q = fp8_linear(latent, attn.wq_b)
            # Stores the whole block before it attends, so every row sees every row.
            return attention.attend(q, kv, attn, config, LayerView(rows, forward.rope, cache))

        sites.extend(block_sites(token_ids, stage, config, attend))
    *_, streams = through_sites(embedded, sites, config, group)
    hidden = collapse_streams(streams, w.hc_head, config)
    normed = rms_norm(hidden, w.norm, config.rms_norm_eps)
    return DraftOutput(hidden, bf16_linear(normed, head, out_dtype=torch.float32))
