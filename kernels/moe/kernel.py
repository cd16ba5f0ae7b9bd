"""Triton routing and MXFP4 experts: two launches for few rows, three for more, with a sort before
them from MANY_PAIRS on, and for prompts as many ranges of columns as the workspace asks for.

`_gate_up` multiplies rows by w1 and w3 of their expert and applies SwiGLU; `_down` multiplies by
w2 and scales by the routing weight; the slots of a row are added in ascending expert id.
`products.py` multiplies.

Up to FEW_PAIRS (row, slot) pairs a program serves one pair (`_gate_up_of_pair`) or one row
(`_down_of_row`), and its mma multiplies several parts of the sum at once. Beyond, a program serves
a tile of pairs that share an expert. Every variant adds the same products in the same order.
"""

import torch
import triton
import triton.language as tl

from dspark.kernels.common.launch_table import LaunchConfig
from dspark.kernels.common.swiglu_kernel import swiglu_values
from dspark.kernels.moe.products import ADD_IN_ORDER, TILE, add_8, place, products
from dspark.kernels.moe.types import Route
from dspark.kernels.moe.words import block_columns

LAUNCH = {
    "gate_up.few": LaunchConfig(4, 3, {"BI": 8}),
    "gate_up.many": LaunchConfig(4, 3, {"BM": 8, "BI": 32}),
    "gate_up.sorted": LaunchConfig(4, 3, {"BM": 8, "BI": 32}),
    "gate_up.prefill": LaunchConfig(8, 2, {"BM": 64, "BI": 64}),
    "down.one": LaunchConfig(4, 3, {"BN": 32}),
    "down.few": LaunchConfig(4, 3, {"BN": 64}),
    "down.many": LaunchConfig(4, 3, {"BM": 8, "BN": 256}),
    "down.sorted": LaunchConfig(4, 3, {"BM": 8, "BN": 256}),
    "down.prefill": LaunchConfig(8, 2, {"BM": 64, "BN": 128}),
    "combine": LaunchConfig(4, 1, {"BT": 8, "BN": 128}),
    "route": LaunchConfig(1, 1, {}),
}
ONE_PAIRS = 18  # pairs up to which the second matrix needs narrow programs to fill the card
FEW_PAIRS = 64  # (row, slot) pairs up to which each has programs of its own
MANY_PAIRS = 512  # pairs up to which a tile finds its rows by itself; beyond, pairs are sorted
# Pairs up to which tiles stay small: 48 requests that verify six rows each choose 1,728 experts of
# 256, so that a tall tile would hold seven rows and read its weights no faster for it.
SORTED_PAIRS = 2048
PREFILL_SLOTS_BYTES = 64 << 20  # workspace bound of the second GEMM


@triton.jit
def _tile_of_pair(experts, pairs, pair, PAIRS: tl.constexpr, BM: tl.constexpr):
    """Decode: the tile that starts at `pair`, found by looking at every pair's expert.

    Returns the expert, the pairs [BM] in it (-1: empty) and whether a tile starts here: it does
    at every BM-th pair of an expert, counted in ascending order.
    """
    lane = tl.arange(0, PAIRS)
    expert = tl.load(experts + pair)
    same = tl.load(experts + lane, mask=lane < pairs, other=-1) == expert
    before = tl.sum((same & (lane < pair)).to(tl.int32))
    nth = tl.cumsum(same.to(tl.int32)) - 1 - before
    here = same[None, :] & (nth[None, :] == tl.arange(0, BM)[:, None])
    members = tl.max(tl.where(here, lane[None, :], -1), 1)
    return expert, members, (expert >= 0) & (before % BM == 0)


@triton.jit
def _tile_of_list(tiles, order, tile, BM: tl.constexpr):
    """Prefill: tile number `tile` of the expert-sorted pair list; see `sorted_tiles`."""
    expert = tl.load(tiles + 3 * tile)
    start = tl.load(tiles + 3 * tile + 1)
    end = tl.load(tiles + 3 * tile + 2)
    at = start + tl.arange(0, BM)
    members = tl.load(order + at, mask=at < end, other=-1)
    return expert, members, start < end


@triton.jit
def _gate_up_of_pair(
    x,  # bf16 [T, HIDDEN]
    w13,  # words i32, gates and ups in turn by eight
    s13,  # u8
    experts,  # i32 [pairs]
    h,  # out bf16 [pairs, WIDTH]
    limit,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    ADD: tl.constexpr,  # ADD_IN_ORDER of SPLITS
    BI: tl.constexpr,
    BK: tl.constexpr,
):
    """h = swiglu(x @ w1.T, x @ w3.T) for BI columns of one pair; program = (columns, pair).

    The rows of the mma are the SPLITS parts of each weight row, its columns the same parts of x;
    a part times itself is what counts. So one pair fills a tile, and no program adds for another.
    """
    block = tl.program_id(0)
    pair = tl.program_id(1)
    expert = tl.load(experts + pair)
    if expert >= 0:
        ROWS: tl.constexpr = 2 * BI
        BLOCKS: tl.constexpr = (HIDDEN + BK - 1) // BK
        PART: tl.constexpr = HIDDEN // SPLITS
        lane = tl.arange(0, SPLITS * ROWS)
        split = lane // ROWS
        at = place(expert, block * ROWS + lane % ROWS, 2 * WIDTH, BLOCKS)
        column = tl.arange(0, 8)  # of the mma
        acc = products(
            x + ((pair // TOPK).to(tl.int64) * HIDDEN + column * PART)[:, None],
            (column < SPLITS)[:, None],
            w13,
            s13,
            at + (split * (BLOCKS // SPLITS) * TILE)[:, None],
            PART,
            1,
            8,
            SPLITS * ROWS,
            BK,
        )
        own = tl.where(split[:, None] == column[None, :], acc, 0.0)
        total = tl.zeros((ROWS,), tl.float32)
        total = ADD(total, tl.sum(own, 1).reshape(SPLITS, ROWS), ROWS)
        gate, up = tl.split(total.reshape(BI // 8, 2, 8).permute(0, 2, 1))
        value = swiglu_values(gate, up, limit).reshape(BI)
        out = h + pair * WIDTH + block * BI + tl.arange(0, BI)
        tl.store(out, value.to(h.dtype.element_ty))


# A single pair (or row) must stay a run-time value: as a constant it would be another binary.
@triton.jit(do_not_specialize=["pairs"])
def _gate_up(
    x,  # bf16 [T, HIDDEN]
    w13,  # words i32, gates and ups in turn by eight
    s13,  # u8
    experts,  # i32 [pairs]
    tiles,  # prefill: i32 [programs, 3]
    order,  # prefill: i32 [pairs]
    h,  # out bf16 [pairs, WIDTH]
    pairs,
    limit,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    PAIRS: tl.constexpr,
    BM: tl.constexpr,
    BI: tl.constexpr,
    BK: tl.constexpr,
):
    """h = swiglu(x @ w1.T, x @ w3.T) for BI columns of one tile; program = (columns, tile).

    The hidden axis is summed in SPLITS parts, as `_gate_up_of_pair` does.
    """
    block = tl.program_id(0)
    tile = tl.program_id(1)
    if PAIRS:
        expert, members, active = _tile_of_pair(experts, pairs, tile, PAIRS, BM)
    else:
        expert, members, active = _tile_of_list(tiles, order, tile, BM)
    if active:
        ROWS: tl.constexpr = 2 * BI
        filled = (members >= 0)[:, None]
        row = tl.maximum(members, 0)[:, None]
        total = products(
            x + (row // TOPK).to(tl.int64) * HIDDEN,
            filled,
            w13,
            s13,
            place(expert, block * ROWS + tl.arange(0, ROWS), 2 * WIDTH, (HIDDEN + BK - 1) // BK),
            HIDDEN,
            SPLITS,
            BM,
            ROWS,
            BK,
        )
        gate, up = tl.split(total.T.reshape(BM, BI // 8, 2, 8).permute(0, 1, 3, 2))
        value = swiglu_values(gate, up, limit).reshape(BM, BI)
        out = h + row * WIDTH + (block * BI + tl.arange(0, BI))[None, :]
        tl.store(out, value.to(h.dtype.element_ty), mask=filled)


@triton.jit
def _down_of_row(
    h,  # bf16 [pairs, WIDTH]
    w2,  # words i32
    s2,  # u8
    weights,  # f32 [pairs]
    experts,  # i32 [pairs]
    shared,  # [T, HIDDEN] or None
    y,  # out bf16 [T, HIDDEN]
    TOPK: tl.constexpr,  # at most 8
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y = sum of weight * (h @ w2.T) over the slots, + shared; program = (BN columns, row).

    A row has all of its experts or, when padded, none.

    The columns of the mma are the h of all slots; its rows are BN columns of two slots at a time,
    of which each counts in its own slot's column.
    """
    block = tl.program_id(0)
    row = tl.program_id(1)
    n = block * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    if tl.load(experts + row * TOPK) >= 0:
        BLOCKS: tl.constexpr = (WIDTH + BK - 1) // BK
        slot = tl.arange(0, 8)
        pair = row * TOPK + slot
        filled = (slot < TOPK)[:, None]
        rows = h + (pair * WIDTH)[:, None]
        weight = tl.load(weights + pair, mask=slot < TOPK, other=0.0)
        lane = tl.arange(0, 2 * BN)
        sums = tl.zeros((2 * BN, 8), tl.float32)
        for step in range((TOPK + 1) // 2):
            own = 2 * step + lane // BN
            # An odd last slot comes twice; the second time its column is zero.
            expert = tl.load(experts + row * TOPK + tl.minimum(own, TOPK - 1))
            acc = products(
                rows,
                filled,
                w2,
                s2,
                place(expert, block * BN + lane % BN, HIDDEN, BLOCKS),
                WIDTH,
                1,
                8,
                2 * BN,
                BK,
            )
            sums = tl.where(own[:, None] == slot[None, :], acc * weight[None, :], sums)
        parts = tl.sum(sums.reshape(2, BN, 8), 0)  # the other slot of two is zero
        total = add_8(total, parts.T, BN)
    at_y = y + row.to(tl.int64) * HIDDEN + n
    if shared is not None:
        total += tl.load(shared + row.to(tl.int64) * HIDDEN + n).to(tl.float32)
    tl.store(at_y, total.to(y.dtype.element_ty))


@triton.jit(do_not_specialize=["pairs"])
def _down(
    h,  # bf16 [pairs, WIDTH]
    w2,  # words i32
    s2,  # u8
    weights,  # f32 [pairs]
    experts,  # i32 [pairs]
    tiles,  # prefill: i32 [programs, 3]
    order,  # prefill: i32 [pairs]
    slots,  # out f32 [pairs, columns]
    pairs,
    first_column,
    columns,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """slots = weight * (h @ w2.T) for BN columns of one tile; program = (columns, tile)."""
    block = tl.program_id(0)
    tile = tl.program_id(1)
    if PAIRS:
        expert, members, active = _tile_of_pair(experts, pairs, tile, PAIRS, BM)
    else:
        expert, members, active = _tile_of_list(tiles, order, tile, BM)
    if active:
        filled = members >= 0
        row = tl.maximum(members, 0)
        column = block * BN + tl.arange(0, BN)
        acc = products(
            h + row.to(tl.int64)[:, None] * WIDTH,
            filled[:, None],
            w2,
            s2,
            place(expert, first_column + column, HIDDEN, (WIDTH + BK - 1) // BK),
            WIDTH,
            1,
            BM,
            BN,
            BK,
        )
        acc *= tl.load(weights + row, mask=filled, other=0.0)[None, :]
        at = row.to(tl.int64)[None, :] * columns + column[:, None]
        tl.store(slots + at, acc, mask=filled[None, :])


@triton.jit(do_not_specialize=["rows"])
def _combine(
    slots,  # f32 [pairs, columns]
    experts,  # i32 [pairs]
    shared,  # [T, hidden] or None
    y,  # out bf16 [T, hidden]
    rows,
    first_column,
    columns,
    hidden,
    TOPK: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
):
    """y = the slots of BT rows in ascending order, then the shared expert; program = (BN, BT)."""
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    inside = t < rows
    total = tl.zeros((BT, BN), tl.float32)
    for slot in tl.static_range(TOPK):
        pair = t * TOPK + slot
        chosen = tl.load(experts + pair, mask=inside, other=-1) >= 0
        at = pair.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(slots + at, mask=chosen[:, None], other=0.0)
    at = t.to(tl.int64)[:, None] * hidden + first_column + column[None, :]
    if shared is not None:
        total += tl.load(shared + at, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _score(logit):
    """sqrt(softplus(logit)) in f32; log1p by the atanh series because fast log is poor near 1."""
    e = tl.exp(-tl.abs(logit))
    s = e / (2.0 + e)
    q = s * s
    series = 1.0 + q * (
        1.0 / 3 + q * (1.0 / 5 + q * (1.0 / 7 + q * (1.0 / 9 + q * (1.0 / 11 + q / 13))))
    )
    return tl.sqrt_rn(tl.maximum(logit, 0.0) + 2.0 * s * series)


@triton.jit
def _route(
    logits,  # f32 [T, count]
    bias,  # f32 [count] or None
    tid2eid,  # i32 [vocab, TOPK] or None
    token_ids,  # i64 [T]
    weights,  # out f32 [T, TOPK]
    experts,  # out i32 [T, TOPK]
    count,
    factor,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,  # TOPK rounded up to a power of two
    EXPERTS: tl.constexpr,  # count rounded up to a power of two
    RENORMALISE: tl.constexpr,
):
    """One row per program; experts leave in ascending id."""
    row = tl.program_id(0)
    token = tl.load(token_ids + row)
    slot = tl.arange(0, SLOTS)
    if token < 0:
        tl.store(experts + row * TOPK + slot, -1, mask=slot < TOPK)
        tl.store(weights + row * TOPK + slot, 0.0, mask=slot < TOPK)
    elif tid2eid is None:
        e = tl.arange(0, EXPERTS)
        real = e < count
        score = _score(tl.load(logits + row * count + e, mask=real, other=0.0))
        ranked = score
        if bias is not None:
            ranked += tl.load(bias + e, mask=real, other=0.0)
        # A NaN still gets its turn after every number, so exactly TOPK experts are chosen.
        ranked = tl.where(ranked == ranked, ranked, -1e30)
        taken = e >= count
        for _ in tl.static_range(TOPK):
            best = tl.argmax(tl.where(taken, float("-inf"), ranked), 0, tie_break_left=True)
            taken = taken | (e == best)
        chosen = taken & real
        weight = score
        if RENORMALISE:
            weight = score / (tl.sum(tl.where(chosen, score, 0.0)) + 1e-20)
        place = row * TOPK + tl.cumsum(chosen.to(tl.int32)) - 1
        tl.store(experts + place, e, mask=chosen)
        tl.store(weights + place, weight * factor, mask=chosen)
    else:
        filled = slot < TOPK
        e = tl.load(tid2eid + token * TOPK + slot, mask=filled, other=2147483647)
        score = _score(tl.load(logits + row * count + e, mask=filled, other=0.0))
        weight = score
        if RENORMALISE:
            weight = score / (tl.sum(tl.where(filled, score, 0.0)) + 1e-20)
        smaller = (e[None, :] < e[:, None]) | (
            (e[None, :] == e[:, None]) & (slot[None, :] < slot[:, None])
        )
        place = row * TOPK + tl.sum(smaller.to(tl.int32), 1)
        tl.store(experts + place, e, mask=filled)
        tl.store(weights + place, weight * factor, mask=filled)


def route(logits, bias, tid2eid, token_ids, k, scale, renormalise=True):
    rows, count = logits.shape
    chosen = Route(
        torch.empty(rows, k, dtype=torch.float32, device=logits.device),
        torch.empty(rows, k, dtype=torch.int32, device=logits.device),
    )
    if rows:
        _route[(rows,)](
            logits,
            bias,
            tid2eid,
            token_ids,
            chosen.weights,
            chosen.experts,
            count,
            scale,
            TOPK=k,
            SLOTS=triton.next_power_of_2(k),
            EXPERTS=triton.next_power_of_2(count),
            RENORMALISE=renormalise,
            **LAUNCH["route"].keywords,
        )
    return chosen


def hidden_splits(hidden: int) -> int:
    """Parts in which w13 sums the hidden axis; a property of the matrix, never of the batch."""
    return next(parts for parts in (4, 2, 1) if parts == 1 or hidden % (1024 * parts) == 0)


def largest_block(size: int, limit: int) -> int:
    """The largest power of two up to `limit` that divides `size`."""
    return min(limit, size & -size)


def moe_mxfp4(x, experts, route, limit, shared):
    rows, hidden = x.shape
    y = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    topk, width = route.experts.shape[1], experts.width
    h = torch.empty(rows * topk, width, dtype=torch.bfloat16, device=x.device)
    if rows * topk <= FEW_PAIRS and topk <= 8:
        _few(x, experts, route, limit, shared, h, y)
    else:
        _many(x, experts, route, limit, shared, h, y)
    return y


def _few(x, experts, route, limit, shared, h, y):
    """A program for every pair, then for every row."""
    (rows, hidden), (pairs, width) = x.shape, h.shape
    topk, splits = pairs // rows, hidden_splits(hidden)
    first = LAUNCH["gate_up.few"]
    second = LAUNCH["down.one" if pairs <= ONE_PAIRS else "down.few"]
    block_i = largest_block(width, first.constexprs["BI"])
    block_n = largest_block(hidden, second.constexprs["BN"])
    _gate_up_of_pair[(width // block_i, pairs)](
        x,
        experts.w13,
        experts.s13,
        route.experts,
        h,
        limit,
        TOPK=topk,
        HIDDEN=hidden,
        WIDTH=width,
        SPLITS=splits,
        ADD=ADD_IN_ORDER[splits],
        BK=block_columns(hidden),
        **{**first.keywords, "BI": block_i},
    )
    _down_of_row[(hidden // block_n, rows)](
        h,
        experts.w2,
        experts.s2,
        route.weights,
        route.experts,
        shared,
        y,
        TOPK=topk,
        HIDDEN=hidden,
        WIDTH=width,
        BK=block_columns(width),
        **{**second.keywords, "BN": block_n},
    )


def _many(x, experts, route, limit, shared, h, y):
    """A program for every tile of pairs that share an expert; the slots are added at the end."""
    (rows, hidden), (pairs, width) = x.shape, h.shape
    topk, splits = pairs // rows, hidden_splits(hidden)
    tiles = order = None
    regime, lanes, programs = "many", MANY_PAIRS, pairs
    if pairs > MANY_PAIRS:
        regime, lanes = "sorted" if pairs <= SORTED_PAIRS else "prefill", 0
        tile_rows = LAUNCH[f"gate_up.{regime}"].constexprs["BM"]
        order, tiles = sorted_tiles(route.experts.flatten(), experts.w13.shape[0], tile_rows)
        programs = tiles.shape[0]

    first = LAUNCH[f"gate_up.{regime}"]
    block_i = largest_block(width, first.constexprs["BI"])
    _gate_up[(width // block_i, programs)](
        x,
        experts.w13,
        experts.s13,
        route.experts,
        tiles,
        order,
        h,
        pairs,
        limit,
        TOPK=topk,
        HIDDEN=hidden,
        WIDTH=width,
        SPLITS=splits,
        PAIRS=lanes,
        BK=block_columns(hidden),
        **{**first.keywords, "BI": block_i},
    )

    second, combine = LAUNCH[f"down.{regime}"], LAUNCH["combine"]
    block_n, block_t = largest_block(hidden, second.constexprs["BN"]), combine.constexprs["BT"]
    columns = max(block_n, PREFILL_SLOTS_BYTES // (4 * pairs * block_n) * block_n)
    columns = min(columns, hidden)
    slots = torch.empty(pairs, columns, dtype=torch.float32, device=x.device)
    for first_column in range(0, hidden, columns):
        width_now = min(columns, hidden - first_column)
        _down[(width_now // block_n, programs)](
            h,
            experts.w2,
            experts.s2,
            route.weights,
            route.experts,
            tiles,
            order,
            slots,
            pairs,
            first_column,
            columns,
            HIDDEN=hidden,
            WIDTH=width,
            PAIRS=lanes,
            BK=block_columns(width),
            **{**second.keywords, "BN": block_n},
        )
        block_c = largest_block(width_now, combine.constexprs["BN"])
        _combine[(width_now // block_c, triton.cdiv(rows, block_t))](
            slots,
            route.experts,
            shared,
            y,
            rows,
            first_column,
            columns,
            hidden,
            TOPK=topk,
            **{**combine.keywords, "BN": block_c},
        )


def sorted_tiles(experts: torch.Tensor, count: int, tile_rows: int):
    """Pairs sorted by expert and cut into tiles, without a host sync.

    experts: i32 [pairs], -1 for none. Returns order i32 [pairs] (stable) and tiles i32
    [pairs//tile_rows + count, 3]: expert, first and last+1 place in `order`; spare tiles are empty.
    """
    ascending, order = torch.sort(experts, stable=True)
    ids = torch.arange(count + 1, dtype=experts.dtype, device=experts.device)
    bounds = torch.searchsorted(ascending, ids)
    last_tile = torch.cumsum((bounds[1:] - bounds[:-1] + tile_rows - 1) // tile_rows, 0)
    tile = torch.arange(experts.shape[0] // tile_rows + count, device=experts.device)
    expert = torch.searchsorted(last_tile, tile, right=True).clamp_(max=count - 1)
    first_tile = (
        last_tile[expert] - (bounds[expert + 1] - bounds[expert] + tile_rows - 1) // tile_rows
    )
    start = bounds[expert] + (tile - first_tile) * tile_rows
    end = torch.minimum(bounds[expert + 1], start + tile_rows)
    return order.int(), torch.stack((expert, start, end), 1).int()
