"""Torch reference of the compressors; also the CPU production path.

An entry is a per-channel softmax average of raw rows. All entries are formed before any raw row
is stored, so a row stored by this forward can never replace one that an entry still reads.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.kernels.common.index_pages import hadamard, store_index
from dspark.kernels.common.kv_pages import store_slots
from dspark.kernels.common.norm_rope import ROPE, rms_scale, rotate, rotation
from dspark.kernels.compress.types import CompressRows, Stream

CHUNK_VALUES = 1 << 21  # f64 values of one gathered operand: bounds a prefill's memory


class Terms(NamedTuple):
    """Where the E x J raw rows of E entries are; a raw row is looked up by (row, column)."""

    batch_row: Tensor  # i64 [E, J] row of s
    from_batch: Tensor  # bool [E, J] take s, not the ring
    ring_row: Tensor  # i64 [E, J] row of the ring
    exists: Tensor  # bool [E, J] False before the start of the sequence
    half: Tensor  # i64 [J] 0 = A half (overlap), 1 = B half; all 0 for C128


class Kind(NamedTuple):
    """What distinguishes the compressors."""

    ratio: int  # tokens of a window
    halves: int  # 2 where windows overlap
    terms: Callable[[Tensor, Tensor, Tensor], Terms]  # of plan rows, emitting rows and positions
    is_index: bool  # keys of the indexer, not latents


def c4_compress_pair(
    main: Stream,
    index: Stream,
    rows: CompressRows,
    cos_sin: Tensor,
    entries_per_page: int = 64,
    eps: float = 1e-6,
    *,
    running: bool,
) -> None:
    """Both compressors of a C4 layer: form the entries that close in this forward, then store the
    raw rows.

    Args:
        main, index: of the latents and of the index keys. Raw rows are
            [kv A | kv B | score A | score B]; rows of one request are consecutive and in position
            order. Rows 0-3 of `ape` bias the A half, 4-7 the B half. Index keys are
            Hadamard-rotated.
        rows: `plan` is position, ring row of position - 7, ring row of position - 3 (-1 before
            the sequence starts; the four rows of a group are consecutive), row index in request.
        cos_sin: f32 [max_positions, 64].
        running: rows of running requests (decode, verify), few enough for `rows_fit_ring`. One
            launch then does everything; otherwise three do, with the same bits.

    Raises:
        ValueError: for shapes that disagree.
    """
    c4_compress(main, rows, cos_sin, entries_per_page, eps)
    c4_compress(index, rows, cos_sin, entries_per_page, eps, index=True)


def c4_compress(
    stream: Stream,
    rows: CompressRows,
    cos_sin: Tensor,
    entries_per_page: int = 64,
    eps: float = 1e-6,
    *,
    index: bool = False,
) -> None:
    """One of the two compressors of `c4_compress_pair`."""
    kind = Kind(4, 2, _c4_terms, index)
    _compress(kind, stream, rows, cos_sin, entries_per_page, eps)


def c128_compress(
    stream: Stream,
    rows: CompressRows,
    cos_sin: Tensor,
    entries_per_page: int = 2,
    eps: float = 1e-6,
) -> None:
    """Form the C128 entries that close in this forward, then store the raw rows.

    As `c4_compress_pair`, with raw rows [kv | score] and ape f32 [128, 512]. `rows.plan` is
    position, first ring row of the request, ring length, row index in request (position p lives
    in ring row first + p % ring).

    Raises:
        ValueError: for shapes that disagree.
    """
    kind = Kind(128, 1, _c128_terms, False)
    _compress(kind, stream, rows, cos_sin, entries_per_page, eps)


def _c4_terms(plan: Tensor, row: Tensor, pos: Tensor) -> Terms:
    j = torch.arange(8, device=plan.device)
    distance = 7 - j
    group = plan[:, 1:3].long()  # ring rows of pos - 7 and pos - 3
    base = group.repeat_interleave(4, 1)
    return _terms(plan, row, pos, distance, ring_row=base + j % 4, half=j // 4)


def _c128_terms(plan: Tensor, row: Tensor, pos: Tensor) -> Terms:
    j = torch.arange(128, device=plan.device)
    distance = 127 - j
    base, ring = plan[:, 1:3].long().unsqueeze(2).unbind(1)
    ring_row = base + (pos[:, None] - distance) % ring
    return _terms(plan, row, pos, distance, ring_row=ring_row, half=torch.zeros_like(j))


def _terms(
    plan: Tensor, row: Tensor, pos: Tensor, distance: Tensor, *, ring_row: Tensor, half: Tensor
) -> Terms:
    """distance: i64 [J] tokens from a term to the end of the window."""
    return Terms(
        batch_row=(row[:, None] - distance).clamp(min=0),
        from_batch=distance <= plan[:, 3, None],
        ring_row=ring_row.clamp(min=0),
        exists=pos[:, None] >= distance,
        half=half,
    )


def _compress(
    kind: Kind,
    stream: Stream,
    rows: CompressRows,
    cos_sin: Tensor,
    entries_per_page: int,
    eps: float,
) -> None:
    s, ape, state, norm_w, pool = stream
    plan, store, slot = rows
    width = norm_w.shape[0]
    # [rows, kv | score, half, Dh]
    raw = s.view(-1, 2, kind.halves, width)
    ring = state.view(-1, 2, kind.halves, width)
    emitting = (slot >= 0).nonzero().squeeze(1)
    for row in emitting.split(max(1, CHUNK_VALUES // (ape.shape[0] * width))):
        pos = plan[row, 0].long()
        t = kind.terms(plan[row], row, pos)
        entry = _pool_rows(_gather(raw, ring, 0, t), _gather(raw, ring, 1, t), ape, t.exists)
        x = _normed_and_rotated(entry, norm_w, cos_sin, pos + 1 - kind.ratio, eps)
        if kind.is_index:
            store_index(pool, slot[row], hadamard(x).float())
        else:
            store_slots(pool, entries_per_page, slot[row], x.float())
    keep = (store >= 0).nonzero().squeeze(1)
    state[store[keep].long()] = s[keep]


def _gather(raw: Tensor, ring: Tensor, part: int, t: Terms) -> Tensor:
    """[E, J, Dh] kv (part 0) or score (part 1) of every term."""
    new = raw[t.batch_row, part, t.half]
    if bool(t.from_batch.all()):
        return new
    return torch.where(t.from_batch[..., None], new, ring[t.ring_row, part, t.half])


def _pool_rows(kv: Tensor, score: Tensor, ape: Tensor, exists: Tensor) -> Tensor:
    """f64 [E, Dh]: sum_j kv_j * softmax_j(score_j + ape_j) over existing terms; 0 if none."""
    logit = (score.double() + ape).masked_fill_(~exists[..., None], -torch.inf)
    top = logit.amax(1, keepdim=True)
    weight = (logit - top.masked_fill(top == -torch.inf, 0.0)).exp_()
    values = kv.double().masked_fill_(~exists[..., None], 0.0)
    # The largest term weighs exactly 1, so the sum is below 1 only when there is no term at all.
    return (weight * values).sum(1) / weight.sum(1).clamp(min=1.0)


def _normed_and_rotated(
    entry: Tensor, norm_w: Tensor, cos_sin: Tensor, pos: Tensor, eps: float
) -> Tensor:
    """RMS norm of entries f64 [E, Dh], then RoPE at the window's first position."""
    x = entry * rms_scale(entry, eps) * norm_w.double()
    x[:, -ROPE:] = rotate(x[:, -ROPE:], rotation(cos_sin, pos))
    return x
