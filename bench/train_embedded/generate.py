"""Sample from the target with caches, many sequences in step.

All sequences are at the same position, so every cache read is a slice. Prompts are fed token by
token through the same code.
"""

from typing import NamedTuple

import torch

from dspark.bench.train_embedded import hyper
from dspark.bench.train_embedded.attention import (
    MASKED,
    Ropes,
    compressed_rows,
    index_scores,
    keys,
    output,
    pool_rows,
    queries,
    round_kv,
    selected,
)
from dspark.bench.train_embedded.linear import Numerics, rms_norm
from dspark.bench.train_embedded.parameters import below
from dspark.bench.train_embedded.target import (
    embed_streams,
    expert_preference,
    ffn_site,
    logits,
    routing_free,
)
from dspark.target.config import ModelConfig

Weights = dict[str, torch.Tensor]


class EntryCache(NamedTuple):
    kv: torch.Tensor  # f32 [B, R, width] rows of the open window (C4: and of the one before)
    score: torch.Tensor  # f32 [B, R, width], with position bias
    entries: torch.Tensor  # [B, M, W]


class LayerCache(NamedTuple):
    window: torch.Tensor  # [B, N, 512]
    compressed: EntryCache | None
    indexer: EntryCache | None


@torch.no_grad()
def generate(
    weights: Weights,
    prompts: torch.Tensor,
    length: int,
    temperature: torch.Tensor,
    ropes: Ropes,
    config: ModelConfig,
    numerics: Numerics,
    generator: torch.Generator,
) -> torch.Tensor:
    """Continue prompts i64 [B, P] to i64 [B, length].

    weights: prepared. temperature: f32 [B]; 0 means greedy.
    """
    batch, given = prompts.shape
    ids = torch.zeros(batch, length, dtype=torch.int64, device=prompts.device)
    ids[:, :given] = prompts
    blocks = [below(weights, f"layers.{i}.") for i in range(config.num_hidden_layers)]
    caches = [
        _empty_cache(ratio, batch, length, config, numerics, prompts.device)
        for ratio in config.compress_ratios
    ]
    for t in range(length - 1):
        token = ids[:, t]
        x = embed_streams(weights, token)
        for layer, own in enumerate(blocks):
            preference = expert_preference(own, token, config)
            x = _decode_block(
                x, routing_free(own), preference, caches[layer], t, ropes,
                config.compress_ratios[layer], config, numerics,
            )  # fmt: skip
        if t + 1 >= given:
            hidden = rms_norm(hyper.head(x, weights, config), weights["norm"], config.rms_norm_eps)
            ids[:, t + 1] = _sample(logits(hidden, weights), temperature, generator)
    return ids


def _sample(
    scores: torch.Tensor, temperature: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Gumbel-max; no noise at temperature 0."""
    uniform = torch.rand(scores.shape, generator=generator, device=scores.device)
    gumbel = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
    return (scores + temperature[:, None] * gumbel).argmax(-1)


def _empty_cache(
    ratio: int,
    batch: int,
    length: int,
    config: ModelConfig,
    numerics: Numerics,
    device: torch.device,
) -> LayerCache:
    def entry_cache(width: int) -> EntryCache:
        rows, columns = (8, 2 * width) if ratio == 4 else (128, width)
        return EntryCache(
            torch.zeros(batch, rows, columns, device=device),
            torch.full((batch, rows, columns), MASKED, device=device),
            torch.zeros(batch, length // ratio, width, dtype=numerics.dtype, device=device),
        )

    return LayerCache(
        torch.zeros(batch, length, config.head_dim, dtype=numerics.dtype, device=device),
        entry_cache(config.head_dim) if ratio else None,
        entry_cache(config.index_head_dim) if ratio == 4 else None,
    )


def _decode_block(
    x: torch.Tensor,
    weights: Weights,
    preference: torch.Tensor,
    cache: LayerCache,
    t: int,
    ropes: Ropes,
    ratio: int,
    config: ModelConfig,
    numerics: Numerics,
) -> torch.Tensor:
    """One layer for the token at position t of every sequence. x: [B, 4, D]."""
    rope = ropes.of(ratio).at(torch.tensor(t, device=x.device))
    mix = hyper.mix(x, weights, "hc_attn", config)
    inner = rms_norm(hyper.sublayer_input(x, mix.pre), weights["attn_norm"], config.rms_norm_eps)
    latent, q = queries(inner, weights, rope, config, numerics)
    cache.window[:, t] = keys(inner, weights, rope, config, numerics)
    visible = cache.window[:, max(0, t + 1 - config.sliding_window) : t + 1]
    scale = config.head_dim**-0.5
    scores = [(q @ visible.mT).float() * scale]
    values = [visible]
    if cache.compressed is not None:
        _store(cache.compressed, inner, t, weights, "attn.compressor", ropes, ratio, config)
        _round_new(cache.compressed, t, ratio, config, numerics)
        closed = (t + 1) // ratio
        entries = cache.compressed.entries[:, :closed]
        far = (q @ entries.mT).float() * scale
        if cache.indexer is not None:
            _store(
                cache.indexer, inner, t, weights, "attn.indexer.compressor", ropes, ratio, config
            )
            if closed > config.index_topk:
                hidden = _unselected(cache.indexer, closed, inner, latent, weights, ropes, t,
                                     config, numerics)  # fmt: skip
                far = far.masked_fill(hidden[:, None], MASKED)
        scores.append(far)
        values.append(entries)
    sink = weights["attn.attn_sink"].view(1, -1, 1).expand(len(x), -1, 1)
    p = torch.cat([*scores, sink], dim=-1).softmax(-1).to(q.dtype)
    o = p[..., :-1] @ torch.cat(values, dim=1)
    x = hyper.update(x, output(o, weights, rope, config, numerics), mix.post, mix.comb)
    return ffn_site(x, weights, preference, config, numerics)[0]


def _store(
    cache: EntryCache,
    inner: torch.Tensor,
    t: int,
    weights: Weights,
    name: str,
    ropes: Ropes,
    ratio: int,
    config: ModelConfig,
) -> None:
    """Keep the raw row of position t and, if a window closes there, pool its entry."""
    kv, score = compressed_rows(inner, weights, name)
    score = score + weights[f"{name}.ape"][t % ratio]
    row = t % len(cache.kv[0])
    cache.kv[:, row], cache.score[:, row] = kv, score
    if (t + 1) % ratio:
        return
    rows_kv, rows_score = cache.kv, cache.score
    if ratio == 4:
        own = torch.arange(row - 3, row + 1)
        before = (own - 4) % 8
        width = cache.entries.shape[-1]
        rows_kv, rows_score = (
            torch.cat((rows[:, before, :width], rows[:, own, width:]), dim=1)
            for rows in (cache.kv, cache.score)
        )
    rope = ropes.yarn.at(torch.tensor(t + 1 - ratio, device=inner.device))
    entry = pool_rows(rows_kv, rows_score, weights, name, rope, config)
    cache.entries[:, t // ratio] = entry.to(cache.entries.dtype)


def _round_new(
    cache: EntryCache, t: int, ratio: int, config: ModelConfig, numerics: Numerics
) -> None:
    if (t + 1) % ratio == 0:
        newest = cache.entries[:, t // ratio]
        cache.entries[:, t // ratio] = round_kv(newest, config, numerics)


def _unselected(
    cache: EntryCache,
    closed: int,
    inner: torch.Tensor,
    latent: torch.Tensor,
    weights: Weights,
    ropes: Ropes,
    t: int,
    config: ModelConfig,
    numerics: Numerics,
) -> torch.Tensor:
    """bool [B, closed]: entries that the indexer leaves out."""
    rope = type(ropes.yarn)(ropes.yarn.cos[t : t + 1], ropes.yarn.sin[t : t + 1])
    scores = index_scores(
        inner[:, None], latent[:, None], cache.entries[:, :closed], weights, rope, config, numerics
    )[:, 0]
    return ~selected(scores, config.index_topk)
