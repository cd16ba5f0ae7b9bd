"""Triton kernels of the indexer.

Top-k is a tournament: a program keeps the k best of as many scores as fit in its registers, and
the winners of several programs play again until one program is left. Ties go to the lower entry
at every level, so the outcome is the same however the field is divided.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.common.index_pages import KEYS, WIDTH
from dspark.kernels.common.index_pages_kernel import (
    PAGE_KEYS,
    W,
    hadamard,
    index_views,
    quantise_keys,
)
from dspark.kernels.common.launch_table import LaunchConfig
from dspark.kernels.common.norm_rope_kernel import rotate
from dspark.kernels.indexer.types import IndexQuery, TopK

PROGRAMS = 2048  # of a launch of the logits kernel: a few times what any card runs at once
MOST_PER_ROW, FEWEST_PER_ROW = 256, 4
LOGITS_BYTES = 64 << 20  # of the scores of one chunk of prefill rows

LAUNCH = {
    "query": LaunchConfig(4, 1, {"BH": 16}),
    "logits": LaunchConfig(4, 3, {}),
    "topk": LaunchConfig(8, 1, {"BLOCK": 4096}),
}


@triton.jit(do_not_specialize=["H"])
def _query(q, w, cos_sin, pos, codes, weight, H, w_scale, BH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    real = head < H
    at = (row * H + head)[:, None] * W + tl.arange(0, W)[None, :]
    x = tl.load(q + at, mask=real[:, None], other=0.0).to(tl.float32)
    x = rotate(x, cos_sin, tl.load(pos + row), W // 2 - 32, BH, W, False)
    code, scale = quantise_keys(hadamard(x, BH))
    tl.store(codes + at, code, mask=real[:, None])
    folded = tl.load(w + row * H + head, mask=real, other=0.0).to(q.dtype.element_ty)
    folded = folded.to(tl.float32) * w_scale * scale
    tl.store(weight + row * H + head, folded, mask=real)


@triton.jit(do_not_specialize=["H", "max_pages", "c_max", "skip"])
def _logits(
    q, weight, codes, scales, page_table, row_req, c4_len, out, H, max_pages, c_max, stride, skip,
    HP: tl.constexpr,
):  # fmt: skip
    """A program scores every num_programs(1)-th page of a row.

    Rows of at most `skip` entries are left alone: the selection takes all of them unseen.
    """
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(row_req + row)
    length = tl.minimum(tl.load(c4_len + row), c_max)
    if (request < 0) | (length <= tl.maximum(skip, tl.program_id(1) * PAGE_KEYS)):
        return
    head = tl.arange(0, HP)
    d = tl.arange(0, W)
    key = tl.arange(0, PAGE_KEYS)
    real = head < H
    at = row * H + head
    query = tl.load(q + at[:, None] * W + d[None, :], mask=real[:, None], other=0.0)
    head_weight = tl.load(weight + at, mask=real, other=0.0)
    pages = page_table + request.to(tl.int64) * max_pages
    for page in range(tl.program_id(1), tl.cdiv(length, PAGE_KEYS), tl.num_programs(1)):
        base = tl.load(pages + page).to(tl.int64) * stride
        k = tl.load(codes + base + d[:, None] + key[None, :] * W)
        k_scale = tl.load(scales + base // 4 + PAGE_KEYS * W // 4 + key)
        dots = tl.maximum(tl.dot(query, k), 0.0, tl.PropagateNan.ALL)
        score = tl.sum(dots * head_weight[:, None], 0) * k_scale
        entry = page * PAGE_KEYS + key
        tl.store(out + row * c_max + entry, score, mask=entry < length)


@triton.jit
def sortable(x):
    """u32 keys > 0 in the order of the f32 values x; -0 equals +0, NaN equals -inf."""
    x = tl.where(x == x, x, float("-inf"))
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def threshold_of(key, K: tl.constexpr):
    """A value that at least K of key u32 [N] reach and fewer than K exceed; N is below 2^21."""
    threshold = tl.full((), 0, tl.uint32)
    shift = tl.full((), 30, tl.int32)
    while shift >= 0:
        # Two bits at a time: one word counts the keys that reach each of three candidates.
        step = tl.full((), 1, tl.uint32) << shift.to(tl.uint32)
        counts = (key >= threshold + step).to(tl.int64)
        counts += (key >= threshold + 2 * step).to(tl.int64) << 21
        counts += (key >= threshold + 3 * step).to(tl.int64) << 42
        counts = tl.sum(counts, 0)
        n1, n2, n3 = counts & 0x1FFFFF, (counts >> 21) & 0x1FFFFF, counts >> 42
        digit = (n1 >= K).to(tl.uint32) + (n2 >= K).to(tl.uint32) + (n3 >= K).to(tl.uint32)
        threshold += digit * step
        reach = tl.where(n3 >= K, n3, tl.where(n2 >= K, n2, n1))
        shift = tl.where(reach == K, -1, shift - 2)  # the lower bits separate nothing more
    return threshold


@triton.jit(do_not_specialize=["c_max", "span", "in_width", "max_pages"])
def _topk(
    scores, entries, c4_len, page_table, row_req, out_scores, out_entries, slots, lengths,
    c_max, span, in_width, max_pages,
    K: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """One level of the tournament: program (row, chunk) keeps the K best of a chunk of the input.

    At the first level the input is the row's scores; later it is the K places of every chunk of
    the level before, each of which stands for `span` entries. The last level has one chunk.
    """
    CHUNK: tl.constexpr = BLOCK // K * K
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    length = tl.minimum(tl.load(c4_len + row), c_max)
    i = tl.arange(0, BLOCK)
    place_in = chunk * CHUNK + i
    present = place_in < length if FIRST else place_in % K < length - place_in // K * span
    present = present & (i < CHUNK) & (place_in < in_width)
    count = tl.sum(present.to(tl.int32), 0)
    if (count == 0) & (tl.num_programs(1) > 1):
        return

    x = tl.load(scores + row * in_width + place_in, mask=present, other=0.0)
    if FIRST:
        entry = place_in
    else:
        entry = tl.load(entries + row * in_width + place_in, mask=present, other=0)
    key = tl.where(present, sortable(x), 0)
    threshold = tl.full((), 0, tl.uint32)
    if count > K:
        threshold = threshold_of(key, K)
    above = key > threshold
    equal = present & (key == threshold)
    room = K - tl.sum(above.to(tl.int32), 0)
    # One scan counts both: BLOCK fits in 16 bits.
    ranks = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    equal_rank = ranks >> 16
    taken = above | (equal & (equal_rank <= room))
    place = (ranks & 0xFFFF) + tl.minimum(equal_rank, room) - 1
    at = (row * tl.num_programs(1) + chunk) * K + place
    tl.store(out_entries + at, entry, mask=taken)
    if LAST:
        request = tl.maximum(tl.load(row_req + row), 0).to(tl.int64)
        page = tl.load(page_table + request * max_pages + entry // PAGE_KEYS, mask=taken, other=0)
        tl.store(slots + at, page * PAGE_KEYS + entry % PAGE_KEYS, mask=taken)
        chosen = tl.minimum(length, K)
        tl.store(lengths + row, chosen)
        tail = (i >= chosen) & (i < K)
        tl.store(out_entries + row * K + i, -1, mask=tail)
        tl.store(slots + row * K + i, -1, mask=tail)
    else:
        tl.store(out_scores + at, x, mask=taken)


def index_q(q, w, cos_sin, pos):
    q = q.contiguous()
    rows, heads, _ = q.shape
    codes = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    weight = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if rows:
        launch = LAUNCH["query"]
        _query[(rows, triton.cdiv(heads, launch.constexprs["BH"]))](
            q, w.contiguous(), cos_sin, pos, codes, weight, heads, (WIDTH * heads) ** -0.5,
            **launch.keywords,
        )  # fmt: skip
    return IndexQuery(codes, weight)


def index_logits(query, pool, page_table, row_req, c4_len, c_max):
    shape = (query.q.shape[0], c_max)
    out = torch.full(shape, -torch.inf, dtype=torch.float32, device=query.q.device)
    _run_logits(query, pool, page_table, row_req, c4_len, out, skip=0)
    return out


def _run_logits(
    query: IndexQuery,
    pool: Tensor,
    page_table: Tensor,
    row_req: Tensor,
    c4_len: Tensor,
    out: Tensor,
    skip: int,
) -> None:
    rows, heads, _ = query.q.shape
    pages = triton.cdiv(out.shape[1], KEYS)
    if rows == 0 or pages == 0:
        return
    launch = LAUNCH["logits"]
    per_row = min(max(triton.cdiv(PROGRAMS, rows), FEWEST_PER_ROW), MOST_PER_ROW, pages)
    _logits[(rows, per_row)](
        query.q, query.weight, *index_views(pool),
        page_table, row_req, c4_len, out,
        heads, page_table.stride(0), out.shape[1], pool.stride(0), skip,
        HP=max(16, triton.next_power_of_2(heads)),
        **launch.keywords,
    )  # fmt: skip


def index_topk(logits, c4_len, page_table, row_req, k):
    logits = logits.contiguous()
    rows, c_max = logits.shape
    slot = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    logical = torch.empty_like(slot)
    length = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return TopK(slot, length, logical)
    launch = LAUNCH["topk"]
    block = max(launch.constexprs["BLOCK"], 2 * triton.next_power_of_2(k))
    field = block // k  # chunks of the level before that one program takes
    scores = entries = logits
    width, span = c_max, 0
    while True:
        chunks = max(1, triton.cdiv(width, field * k))
        first, last = entries is logits, chunks == 1
        winners = (logical, logical)
        if not last:
            shape = (rows, chunks * k)
            winners = (
                torch.empty(shape, dtype=torch.float32, device=logits.device),
                torch.empty(shape, dtype=torch.int32, device=logits.device),
            )
        _topk[(rows, chunks)](
            scores, entries, c4_len, page_table, row_req, *winners, slot, length,
            c_max, span, width, page_table.stride(0), K=k, BLOCK=block, FIRST=first, LAST=last,
            num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip
        if last:
            return TopK(slot, length, logical)
        scores, entries = winners
        width, span = chunks * k, field * (k if first else span)


def index_select(query, pool, page_table, row_req, c4_len, c_max, k):
    rows = query.q.shape[0]
    step = max(1, LOGITS_BYTES // (4 * max(c_max, 1)))
    parts = []
    for start in range(0, max(rows, 1), step):
        part = slice(start, start + step)
        some = IndexQuery(query.q[part], query.weight[part])
        shape = (some.q.shape[0], c_max)
        logits = torch.empty(shape, dtype=torch.float32, device=query.q.device)
        if c_max > k:
            _run_logits(some, pool, page_table, row_req[part], c4_len[part], logits, skip=k)
        parts.append(index_topk(logits, c4_len[part], page_table, row_req[part], k))
    if len(parts) == 1:
        return parts[0]
    return TopK(*(torch.cat(field) for field in zip(*parts, strict=True)))
