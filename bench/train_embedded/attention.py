"""Attention over whole sequences: window, compressed entries, indexer, grouped output."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from dspark.bench.train_embedded.linear import Numerics, linear_f32, linear_fp8, rms_norm
from dspark.bench.train_embedded.quantise import KV_GROUP, fp8_rows
from dspark.target.config import ModelConfig
from dspark.target.rope import rope_table

Weights = dict[str, torch.Tensor]
MASKED = -1e30  # finite: a row without visible keys must not turn into NaN


class Rope(NamedTuple):
    cos: torch.Tensor  # f32 [..., 32]
    sin: torch.Tensor

    def at(self, positions: torch.Tensor) -> "Rope":
        return Rope(self.cos[positions], self.sin[positions])

    def per_head(self) -> "Rope":
        return Rope(self.cos.unsqueeze(-2), self.sin.unsqueeze(-2))

    def inverse(self) -> "Rope":
        return Rope(self.cos, -self.sin)


class Ropes(NamedTuple):
    plain: Rope  # window layers and the draft
    yarn: Rope  # compressed layers

    def of(self, ratio: int) -> Rope:
        return self.yarn if ratio else self.plain


class Entries(NamedTuple):
    keys: torch.Tensor  # [B, M, 512]
    visible: torch.Tensor  # bool [B or 1, N, M]
    index_loss: torch.Tensor  # f32 scalar; 0 without an indexer


def build_ropes(config: ModelConfig, positions: int, device: torch.device) -> Ropes:
    def split(table: torch.Tensor) -> Rope:
        return Rope(*table.to(device).chunk(2, dim=1))

    return Ropes(
        split(rope_table(config.rope_theta, positions, None)),
        split(rope_table(config.compress_rope_theta, positions, config.yarn)),
    )


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate the interleaved pairs of the last 64 columns of [..., K]."""
    width = 2 * rope.cos.shape[-1]
    even, odd = x[..., -width::2].float(), x[..., -width + 1 :: 2].float()
    turned = torch.stack(
        (even * rope.cos - odd * rope.sin, even * rope.sin + odd * rope.cos), dim=-1
    )
    return torch.cat((x[..., :-width], turned.flatten(-2).to(x.dtype)), dim=-1)


class Queries(NamedTuple):
    latent: torch.Tensor  # [..., q_lora_rank], also the indexer's input
    heads: torch.Tensor  # [..., H, 512]


def queries(
    x: torch.Tensor, weights: Weights, rope: Rope, config: ModelConfig, numerics: Numerics
) -> Queries:
    """x: [..., D], normed. rope: at the positions of x."""
    latent = linear_fp8(x, weights["attn.wq_a"], numerics)
    latent = rms_norm(latent, weights["attn.q_norm"], config.rms_norm_eps)
    q = linear_fp8(latent, weights["attn.wq_b"], numerics)
    q = q.unflatten(-1, (config.num_attention_heads, config.head_dim))
    return Queries(latent, rotate(rms_norm(q, None, config.rms_norm_eps), rope.per_head()))


def keys(
    x: torch.Tensor, weights: Weights, rope: Rope, config: ModelConfig, numerics: Numerics
) -> torch.Tensor:
    """Window keys (= values) [..., 512] of x [..., D]."""
    kv = rms_norm(
        linear_fp8(x, weights["attn.wkv"], numerics), weights["attn.kv_norm"], config.rms_norm_eps
    )
    return round_kv(rotate(kv, rope), config, numerics)


def output(
    o: torch.Tensor, weights: Weights, rope: Rope, config: ModelConfig, numerics: Numerics
) -> torch.Tensor:
    """Attention result [..., H, 512] to [..., D]."""
    o = rotate(o, rope.per_head().inverse())
    groups = o.flatten(-2).unflatten(-1, (config.o_groups, -1))
    down = weights["attn.wo_a"].unflatten(0, (config.o_groups, -1))  # [G, R, H/G*512]
    joined = torch.einsum("...gk,grk->...gr", groups, down).flatten(-2)
    return linear_fp8(joined, weights["attn.wo_b"], numerics)


def attend_sequence(
    q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor, window: int, entries: Entries | None
) -> torch.Tensor:
    """Causal window attention in blocks of one window, plus compressed entries.

    q: [B, N, H, 512], N a multiple of the window. kv: [B, N, 512]. Returns [B, N, H, 512].
    """
    batch, length, heads, width = q.shape
    blocks = length // window
    scale = width**-0.5
    blocked = kv.unflatten(1, (blocks, window))
    before = F.pad(blocked, (0, 0, 0, 0, 1, 0))[:, :-1]
    near = torch.cat((before, blocked), dim=2)  # [B, blocks, 2W, 512]
    rows = q.reshape(batch, blocks, window * heads, width)
    scores = (rows @ near.transpose(-1, -2)).float() * scale
    scores = scores.view(batch, blocks, window, heads, 2 * window)
    scores = scores.masked_fill(~_band(blocks, window, q.device), MASKED)
    scores = scores.view(batch, length, heads, 2 * window)
    parts = [scores, sink.view(1, 1, heads, 1).expand(batch, length, heads, 1)]
    if entries is not None:
        far = (q.flatten(1, 2) @ entries.keys.transpose(-1, -2)).float() * scale
        far = far.view(batch, length, heads, -1)
        parts.append(far.masked_fill(~entries.visible[:, :, None], MASKED))
    p = torch.cat(parts, dim=-1).softmax(-1).to(q.dtype)
    near_p = p[..., : 2 * window].reshape(batch, blocks, window * heads, 2 * window)
    o = (near_p @ near).view(batch, length, heads, width)
    if entries is not None:
        o = o + (p[..., 2 * window + 1 :].flatten(1, 2) @ entries.keys).view_as(o)
    return o


def _band(blocks: int, window: int, device: torch.device) -> torch.Tensor:
    """bool [blocks, W, 1, 2W]: key j of (previous block, own block) for query i of the block."""
    i = torch.arange(window, device=device)[:, None]
    j = torch.arange(2 * window, device=device)
    inside = (j > i) & (j <= i + window)
    exists = (torch.arange(blocks, device=device) > 0)[:, None, None] | (j >= window)
    return (inside & exists)[:, :, None]


def compressed_rows(
    x: torch.Tensor, weights: Weights, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(kv, score), f32 [..., rows] each, without the position bias."""
    return (
        linear_f32(x, weights[f"{name}.wkv"]),
        linear_f32(x, weights[f"{name}.wgate"]),
    )


def pool_rows(
    kv: torch.Tensor,
    score: torch.Tensor,
    weights: Weights,
    name: str,
    rope: Rope,
    config: ModelConfig,
) -> torch.Tensor:
    """Entry [..., W] of the rows [..., R, W] of one window, scores with their position bias."""
    entry = (kv * score.softmax(-2)).sum(-2)
    return rotate(rms_norm(entry, weights[f"{name}.norm"], config.rms_norm_eps), rope)


def c4_windows(
    kv: torch.Tensor, score: torch.Tensor, ape: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [B, N, 2W] to the eight rows [B, N/4, 8, W] of every overlapping window."""

    def gather(rows: torch.Tensor, missing: float) -> torch.Tensor:
        overlap, own = rows.unflatten(1, (-1, 4)).chunk(2, dim=-1)  # [B, M, 4, W] each
        overlap = F.pad(overlap, (0, 0, 0, 0, 1, 0), value=missing)[:, :-1]
        return torch.cat((overlap, own), dim=2)

    biased = (score.unflatten(1, (-1, 4)) + ape).flatten(1, 2)
    return gather(kv, 0.0), gather(biased, MASKED)


def c128_windows(
    kv: torch.Tensor, score: torch.Tensor, ape: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [B, N, W] to [B, N/128, 128, W]."""
    ratio = len(ape)
    return kv.unflatten(1, (-1, ratio)), score.unflatten(1, (-1, ratio)) + ape


def sequence_entries(
    x: torch.Tensor,
    latent: torch.Tensor,
    q: torch.Tensor,
    weights: Weights,
    rope: Rope,
    ratio: int,
    dense: torch.Tensor,
    config: ModelConfig,
    numerics: Numerics,
) -> Entries:
    """Entries of a whole sequence and which query sees which.

    Args:
        x: [B, N, D] normed input; latent: [B, N, q_lora_rank]; q: [B, N, H, 512].
        rope: the layer's table from position 0 on.
        dense: bool scalar tensor; True lets a C4 layer see every visible entry.
    """
    windows = c4_windows if ratio == 4 else c128_windows
    length = x.shape[1]
    entry_rope = Rope(rope.cos[:length:ratio], rope.sin[:length:ratio])

    def entries_of(inputs: torch.Tensor, name: str) -> torch.Tensor:
        rows = windows(*compressed_rows(inputs, weights, name), weights[f"{name}.ape"])
        return pool_rows(*rows, weights, name, entry_rope, config)

    entry = round_kv(entries_of(x, "attn.compressor").to(x.dtype), config, numerics)
    count = torch.arange(entry.shape[1], device=x.device)
    closed = (torch.arange(length, device=x.device) + 1) // ratio
    visible = (count < closed[:, None])[None]
    if ratio == 128:
        return Entries(entry, visible, x.new_zeros((), dtype=torch.float32))
    # The indexer imitates the attention; nothing flows back from it into the model.
    index_entry = entries_of(x.detach(), "attn.indexer.compressor")
    logits = index_scores(x.detach(), latent.detach(), index_entry, weights, rope, config, numerics)
    logits = logits.masked_fill(~visible, MASKED)
    loss = _imitation_loss(logits, q.detach(), entry.detach(), visible)
    if entry.shape[1] > config.index_topk:
        visible = visible & (dense | selected(logits.detach(), config.index_topk))
    return Entries(entry, visible, loss)


def selected(scores: torch.Tensor, k: int) -> torch.Tensor:
    """bool [..., M]: the k largest, of equal ones the first."""
    threshold = scores.topk(k, dim=-1).values[..., -1:]
    above, level = scores > threshold, scores == threshold
    room = k - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= room))


def index_scores(
    x: torch.Tensor,
    latent: torch.Tensor,
    index_entry: torch.Tensor,
    weights: Weights,
    rope: Rope,
    config: ModelConfig,
    numerics: Numerics,
) -> torch.Tensor:
    """f32 [B, N, M] of queries at the positions of `rope` against index keys f32 [B, M, 128]."""
    heads, width = config.index_n_heads, config.index_head_dim
    q = linear_fp8(latent, weights["attn.indexer.wq_b"], numerics).unflatten(-1, (heads, width))
    q = rotate(q, Rope(*(table[: x.shape[1]] for table in rope)).per_head())
    gate = linear_f32(x, weights["attn.indexer.weights_proj"]) * (width * heads) ** -0.5
    dots = (q.flatten(1, 2) @ index_entry.to(q.dtype).transpose(-1, -2)).float()
    return (dots.view(*q.shape[:-1], -1).relu() * gate[..., None]).sum(-2)


def _imitation_loss(
    logits: torch.Tensor, q: torch.Tensor, entry: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """KL divergence of the indexer's softmax from the heads' mean attention over the entries."""
    batch, length, heads, width = q.shape
    scores = (q.flatten(1, 2) @ entry.transpose(-1, -2)).float() * width**-0.5
    scores = scores.view(batch, length, heads, -1).masked_fill(~visible[:, :, None], MASKED)
    wanted = scores.softmax(-1).mean(2)
    gap = torch.xlogy(wanted, wanted) - wanted * logits.log_softmax(-1)
    gap = gap.masked_fill(~visible, 0.0).sum(-1)
    return gap.mean()


def round_kv(kv: torch.Tensor, config: ModelConfig, numerics: Numerics) -> torch.Tensor:
    """FP8 round trip of the columns without RoPE."""
    if not numerics.rounding:
        return kv
    nope = config.head_dim - config.qk_rope_head_dim
    return torch.cat((fp8_rows(kv[..., :nope], KV_GROUP), kv[..., nope:]), dim=-1)
