"""Attention of the three V4 layer kinds: window only, C4 (lightning indexer) and C128.

All kinds are shared-KV multi-query attention: one 512-wide latent per token is key and value at
once, so the rotation carried by the value is undone on the output. What differs is the list of
compressed entries a query may read next to its 128-token window:

* ratio 0: none;
* ratio 4: the `index_topk` entries (one per 4 tokens) that the indexer scores highest;
* ratio 128: every entry (one per 128 tokens) whose window has closed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dspark.kernels.attention import SlotList, mla_sparse
from dspark.kernels.compress import CompressRows, Stream, c4_compress_pair, c128_compress
from dspark.kernels.indexer import index_q, index_select
from dspark.kernels.linear import (
    bf16_linear,
    bf16_linear_parts,
    fp8_linear,
    fp8_linear_parts,
    grouped_linear,
    rms_norm,
)
from dspark.kernels.qkv import q_kv_prepare
from dspark.kernels.step import StepMeta
from dspark.target.caches import C4_PER_PAGE, C128_PER_PAGE, PAGE_TOKENS, LayerCaches
from dspark.target.config import ModelConfig
from dspark.target.rope import RopeTables
from dspark.target.weights import AttentionWeights


class Forward(NamedTuple):
    """Rows, tables and memory of one forward; made once, read by every layer."""

    meta: StepMeta
    # Rows of running requests (decode, verify), each request's few enough for
    # `dspark.kernels.compress.rows_fit_ring`; False = rows of prompts.
    running: bool
    rope: RopeTables
    caches: Sequence[LayerCaches]  # one per layer, updated in place


class WindowRows(NamedTuple):
    """What every layer kind needs to know about the rows of a forward. T rows, A window keys."""

    pos: torch.Tensor  # i64 [T]
    own: torch.Tensor  # i32 [T] window slot this row's latent is stored in, -1 for padded rows
    seen: torch.Tensor  # i32 [T, A] window slots to attend, ascending position, -1 tail
    length: torch.Tensor  # i32 [T] of `seen`
    running: bool  # as in `Forward`; the draft's rows count as running


class LayerView(NamedTuple):
    """What one layer's attention works on besides weights."""

    rows: WindowRows
    rope: torch.Tensor  # [maxpos, 64] f32 table of the layer's kind
    caches: LayerCaches  # updated in place


class Projected(NamedTuple):
    """Both low-rank projections of the input rows."""

    latent: torch.Tensor  # [T, q_lora_rank] normed query latent
    kv: torch.Tensor  # [T, 512] before its norm


def window_rows(forward: Forward) -> WindowRows:
    meta = forward.meta
    return WindowRows(
        meta.pos, meta.window_slot, meta.window_seen, meta.window_len, forward.running
    )


def attention(
    x: torch.Tensor,
    w: AttentionWeights,
    config: ModelConfig,
    forward: Forward,
    layer: int,
) -> torch.Tensor:
    """Target attention of one layer.

    Args:
        x: [T, hidden] normed input rows (bf16 served, f32 oracle).

    Returns:
        [T, hidden] this rank's partial sum; the caller reduces over ranks.
    """
    ratio = config.compress_ratios[layer]
    view = LayerView(window_rows(forward), forward.rope.of(ratio), forward.caches[layer])
    latent, kv = project(x, w, config)
    entries = None
    if ratio == 4:
        widths = (w.sink.shape[0] * config.head_dim, config.index_n_heads * config.index_head_dim)
        q, index_query = fp8_linear_parts(latent, w.wq_b, widths)
        entries = _entries_c4(x, index_query, w, config, forward, view)
    else:
        q = fp8_linear(latent, w.wq_b)
        if ratio == 128:
            entries = _entries_c128(x, w, config, forward, view)
    return attend(q, kv, w, config, view, entries)


def project(x: torch.Tensor, w: AttentionWeights, config: ModelConfig) -> Projected:
    """Query latent and key-value latent of x [T, hidden]. Used by the draft too."""
    width = w.kv_norm.shape[0]
    latent, kv = fp8_linear_parts(x, w.wqkv_a, (w.wqkv_a.codes.shape[0] - width, width))
    rank = w.q_norm.shape[0]  # its rows are followed by zeros up to a whole block
    return Projected(rms_norm(latent[:, :rank], w.q_norm, config.rms_norm_eps), kv)


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    w: AttentionWeights,
    config: ModelConfig,
    layer: LayerView,
    entries: SlotList | None = None,
) -> torch.Tensor:
    """Store the rows' latents, attend window plus `entries`, project back. Used by the draft too.

    Args:
        q: [T, H * 512] this rank's queries.
        kv: [T, 512] from `project`.

    Returns:
        [T, hidden] this rank's partial sum.
    """
    rows, rope, caches = layer
    heads = w.sink.shape[0]
    q = q_kv_prepare(
        q.view(-1, heads, config.head_dim),
        kv,
        w.kv_norm,
        rope,
        rows.pos,
        rows.own,
        caches.window,
        PAGE_TOKENS,
        config.rms_norm_eps,
    )
    out = mla_sparse(
        q,
        SlotList(caches.window, PAGE_TOKENS, rows.seen, rows.length),
        entries,
        w.sink,
        config.head_dim**-0.5,
        rope,
        rows.pos,
        running=rows.running,
    )
    groups = heads * config.o_groups // config.num_attention_heads
    grouped = grouped_linear(out.view(out.shape[0], groups, -1), w.wo_a)
    return fp8_linear(grouped, w.wo_b)


def _entries_c128(
    x: torch.Tensor,
    w: AttentionWeights,
    config: ModelConfig,
    forward: Forward,
    layer: LayerView,
) -> SlotList:
    meta, caches = forward.meta, layer.caches
    assert w.wcompress is not None
    assert w.compressor is not None
    assert caches.state is not None
    assert caches.compressed is not None
    c128_compress(
        Stream(
            bf16_linear(x, w.wcompress, out_dtype=torch.float32),
            w.compressor.ape,
            caches.state,
            w.compressor.norm,
            caches.compressed,
        ),
        CompressRows(meta.c128_plan, meta.c128_store, meta.c128_entry),
        layer.rope,
        C128_PER_PAGE,
        config.rms_norm_eps,
    )
    return SlotList(caches.compressed, C128_PER_PAGE, meta.c128_seen, meta.c128_len)


def _entries_c4(
    x: torch.Tensor,
    index_query: torch.Tensor,
    w: AttentionWeights,
    config: ModelConfig,
    forward: Forward,
    layer: LayerView,
) -> SlotList:
    """Form the C4 entries that close in this forward and their index keys, then let the indexer
    choose. Every rank runs all of it: all must select the same entries.

    index_query: [T, index heads * 128].
    """
    meta, rope, caches = forward.meta, layer.rope, layer.caches
    assert w.wcompress is not None
    assert w.compressor is not None
    assert w.index_compressor is not None
    assert caches.state is not None
    assert caches.compressed is not None
    assert caches.index_state is not None
    assert caches.index is not None
    heads = config.index_n_heads
    widths = (4 * config.head_dim, 4 * config.index_head_dim, heads)
    raw, index_raw, head_weights = bf16_linear_parts(x, w.wcompress, widths, torch.float32)
    c4_compress_pair(
        Stream(raw, w.compressor.ape, caches.state, w.compressor.norm, caches.compressed),
        Stream(
            index_raw,
            w.index_compressor.ape,
            caches.index_state,
            w.index_compressor.norm,
            caches.index,
        ),
        CompressRows(meta.c4_plan, meta.c4_store, meta.c4_entry),
        rope,
        C4_PER_PAGE,
        config.rms_norm_eps,
        running=forward.running,
    )
    chosen = index_select(
        index_q(index_query.view(-1, heads, config.index_head_dim), head_weights, rope, meta.pos),
        caches.index,
        meta.page_table,
        meta.row_req,
        meta.c4_len,
        meta.page_table.shape[1] * C4_PER_PAGE,
        config.index_topk,
    )
    return SlotList(caches.compressed, C4_PER_PAGE, chosen.slot, chosen.length)
