"""Triton kernels of K15-K17."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.fp8 import to_e4m3
from dspark.kernels.indexer.pages import KEYS, WIDTH
from dspark.kernels.indexer.types import IndexQuery, TopK
from dspark.kernels.plan import AotEntry, LaunchConfig
from dspark.kernels.qkv.kernel import rotate
from dspark.kernels.qkv.pages import AMAX_FLOOR, FP8_MAX

PROGRAMS_PER_ROW = 64  # most programs that share the pages of one run of rows
LOGITS_BYTES = 256 << 20  # of the scores of one chunk of prefill rows

LAUNCH = {
    "query": LaunchConfig(4, 1, {"BH": 16}),
    "logits": LaunchConfig(4, 2, {"RUN": 8}),
    "topk": LaunchConfig(8, 1, {"BLOCK": 2048}),
}

W = tl.constexpr(WIDTH)
PAGE_KEYS = tl.constexpr(KEYS)
LIMIT = tl.constexpr(FP8_MAX)
FLOOR = tl.constexpr(AMAX_FLOOR)


@triton.jit
def _butterfly(x, N: tl.constexpr, SPAN: tl.constexpr):
    """Sums and differences of the values SPAN apart."""
    pairs = tl.permute(tl.reshape(x, (N, W // (2 * SPAN), 2, SPAN)), (0, 1, 3, 2))
    low, high = tl.split(pairs)
    pairs = tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2))
    return tl.reshape(pairs, (N, W))


@triton.jit
def hadamard(x, N: tl.constexpr):
    """Orthonormal 128-point Hadamard transform, Sylvester order, of x f32 [N, 128]."""
    for stage in tl.static_range(7):
        x = _butterfly(x, N, 1 << stage)
    return x * 0.08838834764831845  # 128 ** -0.5


@triton.jit
def quantise_keys(x):
    """e4m3 codes [N, 128] and f32 scales [N] of x f32 [N, 128]."""
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), FLOOR), LIMIT)
    return to_e4m3(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))), scale


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
    folded = tl.load(w + row * H + head, mask=real, other=0.0).to(tl.float32) * w_scale * scale
    tl.store(weight + row * H + head, folded, mask=real)


@triton.jit(do_not_specialize=["T", "H", "R", "max_pages", "c_max", "skip"])
def _logits(
    q, weight, codes, scales, page_table, row_req, c4_len, out,
    T, H, max_pages, c_max, stride, skip, HP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Rows of one request share each page: the first row of a run of them does all its work.

    A run ends with its request and at multiples of RUN. Rows of at most `skip` entries are left
    alone: the selection takes all of them unseen.
    """
    first = tl.program_id(0)
    request = tl.load(row_req + first)
    if request < 0:
        return
    previous = tl.load(row_req + first - 1, mask=first % RUN != 0, other=-1)
    if previous == request:
        return
    r = tl.arange(0, RUN)
    rows = first + r
    inside = (rows < T) & (r < RUN - first % RUN)
    others = tl.load(row_req + rows, mask=inside, other=-1)
    run = tl.min(tl.where(others == request, RUN, r), 0)
    lengths = tl.load(c4_len + rows, mask=r < run, other=0)
    longest = tl.minimum(tl.max(tl.where(lengths > skip, lengths, 0), 0), c_max)

    head = tl.arange(0, HP)
    d = tl.arange(0, W)
    key = tl.arange(0, PAGE_KEYS)
    real = head < H
    for page in range(tl.program_id(1), tl.cdiv(longest, PAGE_KEYS), tl.num_programs(1)):
        page_id = tl.load(page_table + request.to(tl.int64) * max_pages + page)
        base = page_id.to(tl.int64) * stride
        k = tl.load(codes + base + d[:, None] + key[None, :] * W)
        k_scale = tl.load(scales + base // 4 + PAGE_KEYS * W // 4 + key)
        entry = page * PAGE_KEYS + key
        for i in range(run):
            row = (first + i).to(tl.int64)
            at = row * H + head
            query = tl.load(q + at[:, None] * W + d[None, :], mask=real[:, None], other=0.0)
            head_weight = tl.load(weight + at, mask=real, other=0.0)
            dots = tl.maximum(tl.dot(query, k), 0.0)
            score = tl.sum(dots * head_weight[:, None], 0) * k_scale
            length = tl.load(c4_len + row)
            tl.store(out + row * c_max + entry, score, mask=(entry < length) & (entry < c_max))


@triton.jit
def sortable(x):
    """u32 keys in the order of the f32 values x; -0 equals +0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _digit_of_kth(scores, length, prefix, room, SHIFT: tl.constexpr, BITS: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """One radix pass: among keys that start with `prefix`, the digit of the room-th largest.

    Returns the prefix extended by the digit and the room left below it.
    """
    BINS: tl.constexpr = 1 << BITS
    counts = tl.zeros((BINS,), tl.int32)
    i = tl.arange(0, BLOCK)
    for start in range(0, length, BLOCK):
        key = sortable(tl.load(scores + start + i, mask=start + i < length, other=0.0))
        wanted = start + i < length
        if SHIFT + BITS < 32:
            wanted = wanted & ((key >> (SHIFT + BITS)) == prefix)
        digit = ((key >> SHIFT) & (BINS - 1)).to(tl.int32)
        counts += tl.histogram(digit, BINS, mask=wanted)
    at_least = tl.cumsum(counts, 0, reverse=True)
    bins = tl.arange(0, BINS)
    digit = tl.max(tl.where(at_least >= room, bins, 0), 0)
    above = tl.sum(tl.where(bins > digit, counts, 0), 0)
    return (prefix << BITS) | digit.to(tl.uint32), room - above


@triton.jit(do_not_specialize=["K", "c_max", "max_pages"])
def _topk(
    logits, c4_len, page_table, row_req, slots, lengths, logical, K, c_max, max_pages,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(c4_len + row), c_max)
    request = tl.maximum(tl.load(row_req + row), 0).to(tl.int64)
    scores = logits + row * c_max
    i = tl.arange(0, BLOCK)
    threshold = tl.full((), 0, tl.uint32)
    room = K  # how many entries equal to the threshold are still taken
    if length > K:
        threshold, room = _digit_of_kth(scores, length, threshold, room, 21, 11, BLOCK)
        threshold, room = _digit_of_kth(scores, length, threshold, room, 10, 11, BLOCK)
        threshold, room = _digit_of_kth(scores, length, threshold, room, 0, 10, BLOCK)

    above_before = 0
    equal_before = 0
    for start in range(0, length, BLOCK):
        entry = start + i
        visible = entry < length
        if length > K:
            key = sortable(tl.load(scores + entry, mask=visible, other=0.0))
            above = visible & (key > threshold)
            equal = visible & (key == threshold)
        else:
            above = visible
            equal = visible & (entry < 0)
        # One scan counts both: BLOCK fits in 16 bits.
        ranks = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
        above_rank = above_before + (ranks & 0xFFFF)
        equal_rank = equal_before + (ranks >> 16)
        taken = above | (equal & (equal_rank <= room))
        place = above_rank + tl.minimum(equal_rank, room) - 1
        page = tl.load(page_table + request * max_pages + entry // PAGE_KEYS, mask=taken, other=0)
        at = row * K + place
        tl.store(logical + at, entry, mask=taken)
        tl.store(slots + at, page * PAGE_KEYS + entry % PAGE_KEYS, mask=taken)
        above_before += tl.sum(above.to(tl.int32), 0)
        equal_before += tl.sum(equal.to(tl.int32), 0)
    chosen = tl.minimum(length, K)
    tl.store(lengths + row, chosen)
    for start in range(0, K, BLOCK):
        rest = (start + i >= chosen) & (start + i < K)
        tl.store(logical + row * K + start + i, -1, mask=rest)
        tl.store(slots + row * K + start + i, -1, mask=rest)


def index_q(q: Tensor, w: Tensor, cos_sin: Tensor, pos: Tensor) -> IndexQuery:
    q = q.contiguous()
    rows, heads, _ = q.shape
    codes = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    weight = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if rows:
        launch = LAUNCH["query"]
        _query[(rows, triton.cdiv(heads, launch.constexprs["BH"]))](
            q, w.contiguous(), cos_sin, pos, codes, weight, heads, (WIDTH * heads) ** -0.5,
            num_warps=launch.num_warps, num_stages=launch.num_stages, **launch.constexprs,
        )  # fmt: skip
    return IndexQuery(codes, weight)


def index_logits(
    query: IndexQuery,
    pool: Tensor,
    page_table: Tensor,
    row_req: Tensor,
    c4_len: Tensor,
    c_max: int,
) -> Tensor:
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
    _logits[(rows, min(pages, PROGRAMS_PER_ROW))](
        query.q, query.weight, pool.view(torch.float8_e4m3fn), pool.view(torch.float32),
        page_table, row_req, c4_len, out,
        rows, heads, page_table.stride(0), out.shape[1], pool.stride(0), skip,
        HP=max(16, triton.next_power_of_2(heads)),
        num_warps=launch.num_warps, num_stages=launch.num_stages, **launch.constexprs,
    )  # fmt: skip


def index_topk(logits: Tensor, c4_len: Tensor, page_table: Tensor, row_req: Tensor, k: int) -> TopK:
    rows = logits.shape[0]
    slot = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    logical = torch.empty_like(slot)
    length = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        launch = LAUNCH["topk"]
        _topk[(rows,)](
            logits, c4_len, page_table, row_req, slot, length, logical,
            k, logits.stride(0), page_table.stride(0),
            num_warps=launch.num_warps, num_stages=launch.num_stages, **launch.constexprs,
        )  # fmt: skip
    return TopK(slot, length, logical)


def index_select(
    query: IndexQuery,
    pool: Tensor,
    page_table: Tensor,
    row_req: Tensor,
    c4_len: Tensor,
    c_max: int,
    k: int,
) -> TopK:
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


_POINTERS = {
    "q": "*bf16", "w": "*bf16", "cos_sin": "*fp32", "pos": "*i64", "codes": "*fp8e4nv",
    "weight": "*fp32", "scales": "*fp32", "page_table": "*i32", "row_req": "*i32",
    "c4_len": "*i32", "out": "*fp32", "logits": "*fp32", "slots": "*i32", "lengths": "*i32",
    "logical": "*i32",
}  # fmt: skip


def _entry(op: str, fn: Any, expects_mma: bool, q: str = "*bf16", **constexprs: int) -> AotEntry:
    launch = LAUNCH[op]
    constants = {**launch.constexprs, **constexprs}
    arguments = [argument for argument in fn.arg_names if argument not in constants]
    types = {**_POINTERS, "q": q, "w_scale": "fp32"}
    return AotEntry(
        name=f"indexer.{op}",
        fn=fn,
        signature={argument: types.get(argument, "i32") for argument in arguments},
        constexprs=constants,
        divisible=tuple(a for a in arguments if a in _POINTERS or a == "stride"),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        expects_mma=expects_mma,
        hot=True,
    )


AOT = [
    _entry("query", _query, False),
    _entry("logits", _logits, True, q="*fp8e4nv", HP=64),
    _entry("topk", _topk, False),
]
