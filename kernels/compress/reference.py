"""Torch reference of K12-K14; also the CPU production path.

An entry is a per-channel softmax average of raw rows. All entries are formed before any raw row
is stored, so a row stored by this forward can never replace one that an entry still reads.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.kernels.indexer.pages import store_index
from dspark.kernels.indexer.reference import hadamard
from dspark.kernels.qkv.pages import ROPE, store_slots
from dspark.kernels.qkv.reference import rms_scale, rotate, rotation

CHUNK_VALUES = 1 << 21  # f64 values of one gathered operand: bounds a prefill's memory


class Terms(NamedTuple):
    """Where the E x J raw rows of E entries are; a raw row is looked up by (row, column)."""

    batch_row: Tensor  # i64 [E, J] row of s
    from_batch: Tensor  # bool [E, J] take s, not the ring
    ring_row: Tensor  # i64 [E, J] row of the ring
    exists: Tensor  # bool [E, J] False before the start of the sequence
    half: Tensor  # i64 [J] 0 = A half (overlap), 1 = B half; all 0 for C128


def c4_compress(
    s: Tensor,
    ape: Tensor,
    state: Tensor,
    plan: Tensor,
    store: Tensor,
    norm_w: Tensor,
    cos_sin: Tensor,
    out_loc: Tensor,
    pool: Tensor,
    entries_per_page: int,
    kind: str,
    eps: float,
) -> None:
    def terms(row: Tensor, pos: Tensor, in_req: Tensor) -> Terms:
        j = torch.arange(8, device=s.device)
        distance = 7 - j
        group = plan[row][:, 1:3].long()  # ring rows of pos - 7 and pos - 3
        base = group.repeat_interleave(4, 1)
        return Terms(
            batch_row=(row[:, None] - distance).clamp(min=0),
            from_batch=distance <= in_req[:, None],
            ring_row=(base + j % 4).clamp(min=0),
            exists=pos[:, None] >= distance,
            half=j // 4,
        )

    _compress(
        s, ape, state, plan, store, norm_w, cos_sin, out_loc, pool, entries_per_page, kind, eps,
        ratio=4, halves=2, terms=terms,
    )  # fmt: skip


def c128_compress(
    s: Tensor,
    ape: Tensor,
    state: Tensor,
    plan: Tensor,
    store: Tensor,
    norm_w: Tensor,
    cos_sin: Tensor,
    out_loc: Tensor,
    pool: Tensor,
    entries_per_page: int,
    eps: float,
) -> None:
    def terms(row: Tensor, pos: Tensor, in_req: Tensor) -> Terms:
        j = torch.arange(128, device=s.device)
        distance = 127 - j
        base, ring = plan[row][:, 1:3].long().unsqueeze(2).unbind(1)
        return Terms(
            batch_row=(row[:, None] - distance).clamp(min=0),
            from_batch=distance <= in_req[:, None],
            ring_row=(base + (pos[:, None] - distance) % ring).clamp(min=0),
            exists=pos[:, None] >= distance,
            half=torch.zeros_like(j),
        )

    _compress(
        s, ape, state, plan, store, norm_w, cos_sin, out_loc, pool, entries_per_page, "kv", eps,
        ratio=128, halves=1, terms=terms,
    )  # fmt: skip


def _compress(
    s, ape, state, plan, store, norm_w, cos_sin, out_loc, pool, entries_per_page, kind, eps,
    *, ratio, halves, terms,
) -> None:  # fmt: skip
    width = norm_w.shape[0]
    # [rows, kv | score, half, Dh]
    rows = s.view(-1, 2, halves, width)
    ring = state.view(-1, 2, halves, width)
    emitting = (out_loc >= 0).nonzero().squeeze(1)
    for row in emitting.split(max(1, CHUNK_VALUES // (ape.shape[0] * width))):
        pos = plan[row, 0].long()
        t = terms(row, pos, plan[row, 3].long())
        entry = _pool_rows(_gather(rows, ring, 0, t), _gather(rows, ring, 1, t), ape, t.exists)
        _store_entries(
            entry, norm_w, cos_sin, pos + 1 - ratio, out_loc[row], pool, entries_per_page, kind, eps
        )
    keep = (store >= 0).nonzero().squeeze(1)
    state[store[keep].long()] = s[keep]


def _gather(rows: Tensor, ring: Tensor, part: int, t: Terms) -> Tensor:
    """[E, J, Dh] kv (part 0) or score (part 1) of every term."""
    new = rows[t.batch_row, part, t.half]
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


def _store_entries(
    entry: Tensor,
    norm_w: Tensor,
    cos_sin: Tensor,
    pos: Tensor,
    loc: Tensor,
    pool: Tensor,
    entries_per_page: int,
    kind: str,
    eps: float,
) -> None:
    """K14: RMS norm, RoPE at the window's first position, then the pool's own format."""
    x = entry * rms_scale(entry, eps) * norm_w.double()
    x[:, -ROPE:] = rotate(x[:, -ROPE:], rotation(cos_sin, pos))
    if kind == "index":
        store_index(pool, loc, hadamard(x).float())
    else:
        store_slots(pool, entries_per_page, loc, x.float())
