"""Triton kernels of sparse attention.

Decode regime (also verify and draft): one program per (row, split of 64 list positions, 16 heads)
writes an unnormalised partial; a second kernel adds the partials in list order. The split length is
a constant of the op, so a row's bits do not depend on T, the grid or the device. It never waits for
the device, as a CUDA graph requires.

Prefill: the slots any row lists are dequantised once into a bf16 workspace, then one program per
(row, 16 heads) walks its list.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.attention.types import SlotList
from dspark.kernels.common.kv_pages import HEAD
from dspark.kernels.common.kv_pages_kernel import NOPE_D, ROPE_D, D, load_slot_tile, pool_views
from dspark.kernels.common.launch_table import LaunchConfig
from dspark.kernels.common.norm_rope_kernel import rotate

DECODE_ROWS = 64  # rows of one launch of the split kernel; where nobody says, more are prefill
REPEATED_SLOTS = 1 << 16  # listed slots up to which each has a bf16 key of its own (64 MB)

# CH: list positions of one decode program, BK: of one prefill tile; changing them changes bits.
# BH: heads of one program, the smallest mma M. GROUP: partials added at once.
LAUNCH = {
    "decode": LaunchConfig(8, 1, {"CH": 64, "BH": 16}),
    "combine": LaunchConfig(2, 1, {"GROUP": 16, "BD": 128}),
    "gather": LaunchConfig(4, 1, {"BN": 4}),
    "prefill": LaunchConfig(8, 2, {"BK": 64, "BH": 16}),
}

# Softmax runs in base 2; a finite floor keeps exp2(-inf - -inf) out.
FLOOR = tl.constexpr(-1.0e30)
LOG2E = tl.constexpr(1.4426950408889634)


# Sizes that change from batch to batch must not each compile a variant.
SIZES = ["H", "A", "B", "a_page", "b_page", "a_splits", "splits"]


@triton.jit(do_not_specialize=SIZES)
def _decode(
    q, a_codes, a_rope, a_scales, a_idx, a_len, b_codes, b_rope, b_scales, b_idx, b_len,
    part, part_max, part_sum, scale, H, A, B, a_stride, b_stride, a_page, b_page,
    a_splits, splits, CH: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(2) * BH + tl.arange(0, BH)
    t = tl.arange(0, CH)
    if split < a_splits:
        codes, rope, scales, stride, per_page = a_codes, a_rope, a_scales, a_stride, a_page
        start = split * CH
        at = start + t
        slot = tl.load(a_idx + row * A + at, mask=at < A, other=-1)
        length = tl.load(a_len + row)
    else:
        codes, rope, scales, stride, per_page = b_codes, b_rope, b_scales, b_stride, b_page
        start = (split - a_splits) * CH
        at = start + t
        slot = tl.load(b_idx + row * B + at, mask=at < B, other=-1)
        length = tl.load(b_len + row)
    if start >= length:
        return
    valid = (slot >= 0) & (at < length)

    d = tl.arange(0, D)
    r = tl.arange(0, ROPE_D)
    real = head < H
    q_row = q + (row * H + head)[:, None] * D
    q_nope = tl.load(q_row + d[None, :], mask=real[:, None] & (d < NOPE_D)[None, :], other=0.0)
    q_rope = tl.load(q_row + NOPE_D + r[None, :], mask=real[:, None], other=0.0)
    safe = tl.where(valid, slot, 0)
    page = safe // per_page
    nope, rot = load_slot_tile(
        codes, rope, scales, page, safe - page * per_page, stride, per_page, valid, CH
    )
    s = tl.dot(q_nope, tl.trans(nope))
    s = tl.dot(q_rope, tl.trans(rot), acc=s)
    s = tl.where(valid[None, :], s * (scale * LOG2E), FLOOR)
    top = tl.max(s, 1)
    p = tl.where(valid[None, :], tl.exp2(s - top[:, None]), 0.0)
    p16 = p.to(tl.bfloat16)

    at = (row * splits + split) * H + head
    tl.store(part_max + at, top, mask=real)
    tl.store(part_sum + at, tl.sum(p, 1), mask=real)
    out = part + at[:, None] * D
    tl.store(out + d[None, :], tl.dot(p16, nope), mask=real[:, None] & (d < NOPE_D)[None, :])
    tl.store(out + NOPE_D + r[None, :], tl.dot(p16, rot), mask=real[:, None])


@triton.jit(do_not_specialize=["H", "A", "B", "a_splits", "splits"])
def _combine(
    part, part_max, part_sum, a_len, b_len, sink, cos_sin, pos, out, H, A, B, a_splits, splits,
    CH: tl.constexpr, GROUP: tl.constexpr, BD: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    s = tl.arange(0, GROUP)
    a_used = tl.cdiv(tl.minimum(tl.load(a_len + row), A), CH)
    b_used = tl.cdiv(tl.minimum(tl.load(b_len + row), B), CH)
    end = tl.where(b_used > 0, a_splits + b_used, a_used)

    top = tl.load(sink + head) * LOG2E  # the sink is a key of value 0 that comes first
    total = tl.full((), 1.0, tl.float32)
    acc = tl.zeros((BD,), tl.float32)
    # Groups of splits are aligned to the list, so the order of the sums is fixed as well.
    for first in range(0, end, GROUP):
        at = first + s
        used = (at < a_used) | ((at >= a_splits) & (at < end))
        cell = (row * splits + at) * H + head
        maxima = tl.load(part_max + cell, mask=used, other=FLOOR)
        sums = tl.load(part_sum + cell, mask=used, other=0.0)
        values = tl.load(part + cell[:, None] * D + d[None, :], mask=used[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(maxima, 0))
        decay = tl.exp2(top - new_top)
        weight = tl.where(used, tl.exp2(maxima - new_top), 0.0)
        total = total * decay + tl.sum(weight * sums, 0)
        acc = acc * decay + tl.sum(weight[:, None] * values, 0)
        top = new_top
    o = tl.reshape(acc / total, (1, BD))
    if ROTATE:
        first = (NOPE_D - tl.program_id(2) * BD) // 2
        o = rotate(o, cos_sin, tl.load(pos + row), first, 1, BD, True)
    tl.store(out + (row * H + head) * D + d[None, :], o.to(tl.bfloat16))


@triton.jit(do_not_specialize=["N", "per_page"])
def _gather(codes, rope, scales, slots, out, N, stride, per_page, BN: tl.constexpr):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, D)
    r = tl.arange(0, ROPE_D)
    inside = n < N
    slot = tl.load(slots + n, mask=inside, other=0).to(tl.int64)
    page = slot // per_page
    nope, rot = load_slot_tile(
        codes, rope, scales, page, slot - page * per_page, stride, per_page, inside, BN
    )
    to = out + n.to(tl.int64)[:, None] * D
    tl.store(to + d[None, :], nope, mask=inside[:, None] & (d < NOPE_D)[None, :])
    tl.store(to + NOPE_D + r[None, :], rot, mask=inside[:, None])


@triton.jit(do_not_specialize=["H", "C"])
def _prefill(
    q, kv, idx, length, sink, cos_sin, pos, out, scale, H, C,
    BK: tl.constexpr, BH: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    real = head < H
    d = tl.arange(0, D)
    k = tl.arange(0, BK)
    q_tile = tl.load(q + (row * H + head)[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
    sink_log2 = tl.load(sink + head, mask=real, other=0.0) * LOG2E
    top = sink_log2  # the sink is a key of value 0 that comes first
    total = tl.full((BH,), 1.0, tl.float32)
    acc = tl.zeros((BH, D), tl.float32)
    for first in range(0, tl.load(length + row), BK):
        at = first + k
        slot = tl.load(idx + row * C + at, mask=at < C, other=-1)
        valid = slot >= 0
        safe = tl.where(valid, slot, 0).to(tl.int64)
        keys = tl.load(kv + safe[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
        s = tl.dot(q_tile, tl.trans(keys))
        s = tl.where(valid[None, :], s * (scale * LOG2E), FLOOR)
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.where(valid[None, :], tl.exp2(s - new_top[:, None]), 0.0)
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.bfloat16), keys, acc=acc * decay[:, None])
        top = new_top
    o = acc / total[:, None]
    if ROTATE:
        o = rotate(o, cos_sin, tl.load(pos + row), NOPE_D // 2, BH, D, True)
    tl.store(
        out + (row * H + head)[:, None] * D + d[None, :], o.to(tl.bfloat16), mask=real[:, None]
    )


def mla_sparse(q, window, compressed, sink, scale, cos_sin, pos, *, running=None):
    listed = [one for one in (window, compressed) if one is not None]
    lists = [one._replace(idx=one.idx.contiguous()) for one in listed]
    q = q.contiguous()
    if q.shape[0] == 0:
        return torch.empty_like(q)
    output = Output(sink, scale, cos_sin, pos)
    if running is None:
        running = q.shape[0] <= DECODE_ROWS
    if not running:
        return _run_prefill(q, lists, output)
    out = torch.empty_like(q)
    # In parts, because every row needs room for its partials.
    for first in range(0, q.shape[0], DECODE_ROWS):
        part = slice(first, first + DECODE_ROWS)
        some = [one.rows(part) for one in lists]
        _run_decode(q[part], some, output._replace(pos=pos[part]), out[part])
    return out


class Output(NamedTuple):
    """What turns scores into the output; as in `mla_sparse`."""

    sink: Tensor
    scale: float
    cos_sin: Tensor | None
    pos: Tensor

    @property
    def rotation(self) -> tuple[Tensor, Tensor]:
        """The angles, or anything where nothing rotates, and the positions."""
        return self.sink if self.cos_sin is None else self.cos_sin, self.pos


def _run_decode(q: Tensor, lists: list[SlotList], output: Output, out: Tensor) -> None:
    rows, heads, _ = q.shape
    a, b = lists[0], lists[-1]
    a_width = a.idx.shape[1]
    b_width = b.idx.shape[1] if len(lists) == 2 else 0
    decode, combine = LAUNCH["decode"], LAUNCH["combine"]
    split = decode.constexprs["CH"]
    a_splits = triton.cdiv(a_width, split)
    splits = a_splits + triton.cdiv(b_width, split)
    part = torch.empty(rows, splits, heads, HEAD, dtype=torch.float32, device=q.device)
    part_max = torch.empty(rows, splits, heads, dtype=torch.float32, device=q.device)
    part_sum = torch.empty_like(part_max)
    _decode[(rows, splits, triton.cdiv(heads, decode.constexprs["BH"]))](
        q, *pool_views(a.pool), a.idx, a.length, *pool_views(b.pool), b.idx, b.length,
        part, part_max, part_sum, output.scale, heads, a_width, b_width,
        a.pool.stride(0), b.pool.stride(0), a.per_page, b.per_page, a_splits, splits,
        **decode.keywords,
    )  # fmt: skip
    _combine[(rows, heads, HEAD // combine.constexprs["BD"])](
        part, part_max, part_sum, a.length, b.length, output.sink, *output.rotation,
        out, heads, a_width, b_width, a_splits, splits,
        CH=split, ROTATE=output.cos_sin is not None,
        **combine.keywords,
    )  # fmt: skip


def _run_prefill(q: Tensor, lists: list[SlotList], output: Output) -> Tensor:
    rows, heads, _ = q.shape
    listed_slots = sum(part.idx.numel() for part in lists)
    number = _number if listed_slots <= REPEATED_SLOTS else _renumber
    slots, idx = zip(*map(number, lists), strict=True)
    counts = [used.shape[0] for used in slots]
    kv = torch.empty(sum(counts), HEAD, dtype=torch.bfloat16, device=q.device)
    for part, used, to in zip(lists, slots, kv.split(counts), strict=True):
        gather_dequant(part, used, to)
    length = lists[0].length
    if len(lists) == 2:
        idx = (idx[0], torch.where(idx[1] >= 0, idx[1] + counts[0], -1))
        length = torch.where(lists[1].length > 0, idx[0].shape[1] + lists[1].length, length)
    listed = torch.cat(idx, 1)
    out = torch.empty_like(q)
    launch = LAUNCH["prefill"]
    _prefill[(rows, triton.cdiv(heads, launch.constexprs["BH"]))](
        q, kv, listed, length, output.sink, *output.rotation, out,
        output.scale, heads, listed.shape[1], ROTATE=output.cos_sin is not None,
        **launch.keywords,
    )  # fmt: skip
    return out


def _number(part: SlotList) -> tuple[Tensor, Tensor]:
    """What `_renumber` returns, but a slot is listed again for every row that reads it.

    The keys of a row are the same, so are its bits; and nothing waits for the device.
    """
    column = torch.arange(part.idx.shape[1], device=part.idx.device)
    listed = (column < part.length[:, None]) & (part.idx >= 0)
    place = torch.arange(part.idx.numel(), device=part.idx.device, dtype=torch.int32)
    slots = part.idx.masked_fill(~listed, 0).flatten()
    return slots, torch.where(listed, place.view_as(part.idx), -1)


def _renumber(part: SlotList) -> tuple[Tensor, Tensor]:
    """(slots any row lists [N], idx with each slot replaced by its place among them).

    Waits for the device to learn N, which only prefill may do.
    """
    column = torch.arange(part.idx.shape[1], device=part.idx.device)
    idx = part.idx.masked_fill(column >= part.length[:, None], -1).long()
    used = torch.zeros(part.pool.shape[0] * part.per_page + 1, dtype=torch.bool, device=idx.device)
    used[idx] = True  # -1 marks the extra last element
    used[-1] = False
    place = used.cumsum(0, dtype=torch.int32) - 1
    return used.nonzero().squeeze(1).int(), torch.where(idx >= 0, place[idx], -1)


def gather_dequant(part: SlotList, slots: Tensor, out: Tensor) -> None:
    """Slots [N] of a packed pool -> out bf16 [N, 512], exactly."""
    if slots.shape[0] == 0:
        return
    launch = LAUNCH["gather"]
    _gather[(triton.cdiv(slots.shape[0], launch.constexprs["BN"]),)](
        *pool_views(part.pool), slots, out, slots.shape[0], part.pool.stride(0), part.per_page,
        **launch.keywords,
    )  # fmt: skip
