"""Triton routing and MXFP4 experts: two launches per decode step, deterministic in every split.

`_gate_up` multiplies the rows of one expert by w1 and w3 and applies SwiGLU; `_down` multiplies by
w2, scales by the routing weight and adds the slots of each row. Weights stream once through
shared memory as packed bytes and become bf16 in registers, right before the mma.
"""

import torch
import triton
import triton.language as tl

from dspark.kernels.linear.arrivals import arrival_counters, last_to_arrive
from dspark.kernels.linear.kernel import swiglu_values
from dspark.kernels.moe.reference import Route
from dspark.kernels.plan import AotEntry, LaunchConfig

# Rows of one expert per tile. A tile never changes the order in which a row's products are added.
LAUNCH = {
    "gate_up.few": LaunchConfig(4, 3, {"BM": 8, "BI": 32, "BK": 256}),
    "gate_up.many": LaunchConfig(4, 3, {"BM": 16, "BI": 32, "BK": 256}),
    "gate_up.prefill": LaunchConfig(8, 3, {"BM": 64, "BI": 64, "BK": 128}),
    "down.few": LaunchConfig(4, 3, {"BM": 8, "BN": 128, "BK": 256}),
    "down.many": LaunchConfig(4, 3, {"BM": 16, "BN": 128, "BK": 256}),
    "down.prefill": LaunchConfig(8, 3, {"BM": 64, "BN": 128, "BK": 128}),
    "combine": LaunchConfig(4, 1, {"BT": 8, "BN": 128}),
    "route": LaunchConfig(1, 1, {}),
}
FEW_PAIRS, MANY_PAIRS = 64, 512  # (row, slot) pairs up to which a tile finds its own rows
PREFILL_SLOTS_BYTES = 64 << 20  # workspace bound of the second GEMM


@triton.jit
def _bf16_weights(packed, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """E2M1 pairs u8 [ROWS, COLUMNS/2] and E8M0 u8 [ROWS, COLUMNS/32] -> exact bf16 weights.

    Magnitude bits at 6..8 and the sign at 15 of a bf16 read as value * 2^-126, 0.5 being a
    subnormal. Both nibbles of a byte are placed at once, in the halves of a 32-bit word. 2^126
    and the scale multiply separately because their product overflows for scales >= 4.
    """
    spread = (packed.to(tl.uint32) * 0x1001) & 0x000F000F
    placed = (spread * 0x1040) & 0x81C081C0
    even, odd = placed.to(tl.uint16), (placed >> 16).to(tl.uint16)
    codes = tl.join(even, odd).reshape(ROWS, COLUMNS).to(tl.bfloat16, bitcast=True)
    values = codes * tl.full((), 8.507059173023462e37, tl.float32).to(tl.bfloat16)  # 2^126
    scale = (scales.to(tl.uint16) << 7).to(tl.bfloat16, bitcast=True)
    return (values.reshape(ROWS, COLUMNS // 32, 32) * scale[:, :, None]).reshape(ROWS, COLUMNS)


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
    place = tl.cumsum(same.to(tl.int32)) - 1 - before
    here = same[None, :] & (place[None, :] == tl.arange(0, BM)[:, None])
    members = tl.max(tl.where(here, lane[None, :], -1), 1)
    return expert, members, (expert >= 0) & (before % BM == 0)


@triton.jit
def _tile_of_list(tiles, order, tile, BM: tl.constexpr):
    """Prefill: tile number `tile` of the expert-sorted pair list; see `_sorted_tiles`."""
    expert = tl.load(tiles + 3 * tile)
    start = tl.load(tiles + 3 * tile + 1)
    end = tl.load(tiles + 3 * tile + 2)
    at = start + tl.arange(0, BM)
    members = tl.load(order + at, mask=at < end, other=-1)
    return expert, members, start < end


@triton.jit
def _products(
    rows,  # pointers [BM, 1] to activation rows
    filled,  # [BM, 1]: which of them exist
    weights,  # pointers [BN, 1] to packed weight rows
    scales,  # pointers [BN, 1] to their scale rows
    first,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """f32 [BN, BM]: products over K columns from column `first`, added in ascending order."""
    acc = tl.zeros((BN, BM), tl.float32)
    column = tl.arange(0, BK)[None, :]
    byte = tl.arange(0, BK // 2)[None, :]
    group = tl.arange(0, BK // 32)[None, :]
    for block in range(K // BK):
        at = first + block * BK
        packed = tl.load(weights + (at // 2 + byte))
        scale = tl.load(scales + (at // 32 + group))
        x = tl.load(rows + (at + column), mask=filled, other=0.0)
        acc = tl.dot(_bf16_weights(packed, scale, BN, BK), x.T, acc)
    return acc


# A single pair (or row) must stay a run-time value: as a constant it would be another binary.
@triton.jit(do_not_specialize=["pairs"])
def _gate_up(
    x,  # bf16 [T, HIDDEN]
    w13,  # u8 [E, 2*WIDTH, HIDDEN/2]
    s13,  # u8 [E, 2*WIDTH, HIDDEN/32]
    experts,  # i32 [pairs]
    tiles,  # prefill: i32 [programs, 3]
    order,  # prefill: i32 [pairs]
    h,  # out bf16 [pairs, WIDTH]
    partials,  # f32 [SPLITS, pairs, 2*WIDTH] when GRID_SPLITS > 1
    arrivals,
    pairs,
    limit,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    GRID_SPLITS: tl.constexpr,
    PAIRS: tl.constexpr,
    BM: tl.constexpr,
    BI: tl.constexpr,
    BK: tl.constexpr,
):
    """h = swiglu(x @ w1.T, x @ w3.T) for BI columns of one tile; program = (columns, split, tile).

    The hidden axis is summed in SPLITS fixed parts, by as many programs (decode) or by one.
    """
    block = tl.program_id(0)
    split = tl.program_id(1)
    tile = tl.program_id(2)
    if PAIRS:
        expert, members, active = _tile_of_pair(experts, pairs, tile, PAIRS, BM)
    else:
        expert, members, active = _tile_of_list(tiles, order, tile, BM)
    if active:
        part: tl.constexpr = HIDDEN // SPLITS
        filled = members >= 0
        row = tl.maximum(members, 0)
        lane = tl.arange(0, 2 * BI)
        column = block * BI + lane % BI
        weight_row = expert.to(tl.int64) * (2 * WIDTH) + (lane // BI) * WIDTH + column
        total = tl.zeros((2 * BI, BM), tl.float32)
        for own in range(SPLITS // GRID_SPLITS):
            total += _products(
                x + (row // TOPK).to(tl.int64)[:, None] * HIDDEN,
                filled[:, None],
                w13 + weight_row[:, None] * (HIDDEN // 2),
                s13 + weight_row[:, None] * (HIDDEN // 32),
                (split + own) * part,
                part,
                BM,
                2 * BI,
                BK,
            )
        j = block * BI + tl.arange(0, BI)
        out = h + (row[:, None] * WIDTH + j[None, :])
        if GRID_SPLITS > 1:
            width2: tl.constexpr = 2 * WIDTH
            at = (row[None, :] * width2 + ((lane // BI) * WIDTH + column)[:, None]).to(tl.int64)
            stride = pairs.to(tl.int64) * width2
            tl.store(partials + split * stride + at, total, mask=filled[None, :])
            if last_to_arrive(arrivals + tile * (WIDTH // BI) + block, GRID_SPLITS):
                gate = tl.zeros((BM, BI), tl.float32)
                up = tl.zeros((BM, BI), tl.float32)
                source = partials + row.to(tl.int64)[:, None] * width2 + j[None, :]
                for s in tl.static_range(GRID_SPLITS):
                    gate += tl.load(
                        source + s * stride, mask=filled[:, None], other=0.0, cache_modifier=".cg"
                    )
                    up += tl.load(
                        source + s * stride + WIDTH,
                        mask=filled[:, None],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                value = swiglu_values(gate, up, limit)
                tl.store(out, value.to(h.dtype.element_ty), mask=filled[:, None])
        else:
            gate, up = tl.split(total.reshape(2, BI, BM).permute(2, 1, 0))
            value = swiglu_values(gate, up, limit)
            tl.store(out, value.to(h.dtype.element_ty), mask=filled[:, None])


@triton.jit
def _sum_slots(
    slots,  # f32 [pairs, columns]
    experts,  # i32 [pairs]
    shared,
    y,
    first_row,
    rows,
    column,  # [BN] of `slots`
    n,  # the same columns in y and shared
    columns,
    hidden,
    TOPK: tl.constexpr,
    BT: tl.constexpr,
):
    """y = the slots of BT rows in ascending order, then the shared expert."""
    t = first_row + tl.arange(0, BT)
    inside = t < rows
    total = tl.zeros((BT, n.shape[0]), tl.float32)
    for slot in tl.static_range(TOPK):
        pair = t * TOPK + slot
        chosen = tl.load(experts + pair, mask=inside, other=-1) >= 0
        at = pair.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(slots + at, mask=chosen[:, None], other=0.0, cache_modifier=".cg")
    at = t.to(tl.int64)[:, None] * hidden + n[None, :]
    if shared is not None:
        total += tl.load(shared + at, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["pairs", "rows"])
def _down(
    h,  # bf16 [pairs, WIDTH]
    w2,  # u8 [E, HIDDEN, WIDTH/2]
    s2,  # u8 [E, HIDDEN, WIDTH/32]
    weights,  # f32 [pairs]
    experts,  # i32 [pairs]
    tiles,  # prefill: i32 [programs, 3]
    order,  # prefill: i32 [pairs]
    slots,  # f32 [pairs, columns]
    shared,  # [T, HIDDEN] or None
    y,  # out bf16 [T, HIDDEN]; written here in decode
    arrivals,
    pairs,
    rows,
    first_column,
    columns,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
):
    """slots = weight * (h @ w2.T) for BN columns of one tile; program = (columns, tile).

    In decode the last program of a column block also adds the slots of every row.
    """
    block = tl.program_id(0)
    tile = tl.program_id(1)
    if PAIRS:
        expert, members, active = _tile_of_pair(experts, pairs, tile, PAIRS, BM)
    else:
        expert, members, active = _tile_of_list(tiles, order, tile, BM)
    column = block * BN + tl.arange(0, BN)
    n = first_column + column
    if active:
        filled = members >= 0
        row = tl.maximum(members, 0)
        weight_row = expert.to(tl.int64) * HIDDEN + n
        acc = _products(
            h + row.to(tl.int64)[:, None] * WIDTH,
            filled[:, None],
            w2 + weight_row[:, None] * (WIDTH // 2),
            s2 + weight_row[:, None] * (WIDTH // 32),
            0,
            WIDTH,
            BM,
            BN,
            BK,
        )
        acc *= tl.load(weights + row, mask=filled, other=0.0)[None, :]
        at = row.to(tl.int64)[None, :] * columns + column[:, None]
        tl.store(slots + at, acc, mask=filled[None, :])
    if PAIRS and last_to_arrive(arrivals + block, pairs):
        for first_row in range(0, rows, BT):
            _sum_slots(
                slots, experts, shared, y, first_row, rows, column, n, columns, HIDDEN, TOPK, BT
            )


@triton.jit
def _combine(
    slots,
    experts,
    shared,
    y,
    rows,
    first_column,
    columns,
    hidden,
    TOPK: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
):
    """Prefill: add the slots of BT rows and BN columns; program = (columns, rows)."""
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    n = first_column + column
    first_row = tl.program_id(1) * BT
    _sum_slots(slots, experts, shared, y, first_row, rows, column, n, columns, hidden, TOPK, BT)


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
            num_warps=LAUNCH["route"].num_warps,
        )
    return chosen


def hidden_splits(hidden: int) -> int:
    """Parts in which w13 sums the hidden axis; a property of the matrix, never of the batch."""
    return max(1, min(4, hidden // 1024))


def largest_block(size: int, limit: int) -> int:
    """The largest power of two up to `limit` that divides `size`."""
    return min(limit, size & -size)


def moe_mxfp4(x, experts, route, limit, shared):
    rows, hidden = x.shape
    y = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    topk, width = route.experts.shape[1], 2 * experts.w2.shape[2]
    pairs = rows * topk
    splits = hidden_splits(hidden)
    h = torch.empty(pairs, width, dtype=torch.bfloat16, device=x.device)
    arrivals = arrival_counters(x.device)
    tiles = order = None
    if pairs <= MANY_PAIRS:
        regime, lanes = ("few", FEW_PAIRS) if pairs <= FEW_PAIRS else ("many", MANY_PAIRS)
        programs, grid_splits = pairs, splits
        partials = torch.empty(splits, pairs, 2 * width, dtype=torch.float32, device=x.device)
    else:
        regime, lanes, grid_splits, partials = "prefill", 0, 1, None
        tile_rows = LAUNCH["gate_up.prefill"].constexprs["BM"]
        order, tiles = sorted_tiles(route.experts.flatten(), experts.w13.shape[0], tile_rows)
        programs = tiles.shape[0]

    first = LAUNCH[f"gate_up.{regime}"]
    columns_per_program = largest_block(width, first.constexprs["BI"])
    _gate_up[(width // columns_per_program, grid_splits, programs)](
        x,
        experts.w13,
        experts.s13,
        route.experts,
        tiles,
        order,
        h,
        partials,
        arrivals,
        pairs,
        limit,
        TOPK=topk,
        HIDDEN=hidden,
        WIDTH=width,
        SPLITS=splits,
        GRID_SPLITS=grid_splits,
        PAIRS=lanes,
        BM=first.constexprs["BM"],
        BI=columns_per_program,
        BK=largest_block(hidden // splits, first.constexprs["BK"]),
        num_warps=first.num_warps,
        num_stages=first.num_stages,
    )

    second, combine = LAUNCH[f"down.{regime}"], LAUNCH["combine"]
    block_n = largest_block(hidden, second.constexprs["BN"])
    block_t = combine.constexprs["BT"]
    columns = (
        hidden if lanes else max(block_n, PREFILL_SLOTS_BYTES // (4 * pairs * block_n) * block_n)
    )
    columns = min(columns, hidden)
    slots = torch.empty(pairs, columns, dtype=torch.float32, device=x.device)
    for first_column in range(0, hidden, columns):
        blocks = min(columns, hidden - first_column) // block_n
        _down[(blocks, programs)](
            h,
            experts.w2,
            experts.s2,
            route.weights,
            route.experts,
            tiles,
            order,
            slots,
            shared,
            y,
            arrivals,
            pairs,
            rows,
            first_column,
            columns,
            TOPK=topk,
            HIDDEN=hidden,
            WIDTH=width,
            PAIRS=lanes,
            BM=second.constexprs["BM"],
            BN=block_n,
            BK=largest_block(width, second.constexprs["BK"]),
            BT=block_t,
            num_warps=second.num_warps,
            num_stages=second.num_stages,
        )
        if not lanes:
            _combine[(blocks, triton.cdiv(rows, block_t))](
                slots,
                route.experts,
                shared,
                y,
                rows,
                first_column,
                columns,
                hidden,
                TOPK=topk,
                BT=block_t,
                BN=block_n,
                num_warps=combine.num_warps,
            )
    return y


def sorted_tiles(experts: torch.Tensor, count: int, tile_rows: int):
    """K21: pairs sorted by expert and cut into tiles, without a host sync.

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


def _aot() -> list[AotEntry]:
    """One rank of the 256-expert model: hidden 4096, width 256 of 2048, six experts a row."""
    hidden, width, topk = 4096, 256, 6
    splits = hidden_splits(hidden)
    lanes = {"few": FEW_PAIRS, "many": MANY_PAIRS, "prefill": 0}
    gate_up = {
        "x": "*bf16",
        "w13": "*u8",
        "s13": "*u8",
        "experts": "*i32",
        "tiles": "*i32",
        "order": "*i32",
        "h": "*bf16",
        "partials": "*fp32",
        "arrivals": "*i32",
        "pairs": "i32",
        "limit": "fp32",
    }
    down = {
        "h": "*bf16",
        "w2": "*u8",
        "s2": "*u8",
        "weights": "*fp32",
        "experts": "*i32",
        "tiles": "*i32",
        "order": "*i32",
        "slots": "*fp32",
        "shared": "*bf16",
        "y": "*bf16",
        "arrivals": "*i32",
        "pairs": "i32",
        "rows": "i32",
        "first_column": "i32",
        "columns": "i32",
    }
    combine = {n: down[n] for n in ("slots", "experts", "shared", "y", "rows")}
    combine |= {"first_column": "i32", "columns": "i32", "hidden": "i32"}
    route = {
        "logits": "*fp32",
        "bias": "*fp32",
        "tid2eid": "*i32",
        "token_ids": "*i64",
        "weights": "*fp32",
        "experts": "*i32",
        "count": "i32",
        "factor": "fp32",
    }
    choice = {"TOPK": topk, "SLOTS": 8, "EXPERTS": 256, "RENORMALISE": True}

    def entry(name, fn, launch, signature, constexprs, mma=False):
        unaligned = ("pairs", "rows", "limit", "factor")
        return AotEntry(
            name=f"moe.{name}",
            fn=fn,
            signature={n: t for n, t in signature.items() if n not in constexprs},
            constexprs=constexprs,
            divisible=tuple(n for n in signature if n not in (*constexprs, *unaligned)),
            num_warps=LAUNCH[launch].num_warps,
            num_stages=LAUNCH[launch].num_stages,
            expects_mma=mma,
            hot=True,
        )

    entries = []
    for regime, regime_lanes in lanes.items():
        absent = {"tiles": None, "order": None} if regime_lanes else {"partials": None}
        sizes = {"TOPK": topk, "HIDDEN": hidden, "WIDTH": width, "PAIRS": regime_lanes}
        first = {
            "SPLITS": splits,
            "GRID_SPLITS": splits if regime_lanes else 1,
            **LAUNCH[f"gate_up.{regime}"].constexprs,
        }
        second = {
            "BT": LAUNCH["combine"].constexprs["BT"],
            **LAUNCH[f"down.{regime}"].constexprs,
        }
        absent_down = {n: v for n, v in absent.items() if n in down}
        entries += [
            entry(
                f"gate_up[{regime}]",
                _gate_up,
                f"gate_up.{regime}",
                gate_up,
                sizes | first | absent,
                mma=True,
            ),
            entry(
                f"down[{regime}]",
                _down,
                f"down.{regime}",
                down,
                sizes | second | absent_down,
                mma=True,
            ),
        ]
    return [
        *entries,
        entry(
            "combine", _combine, "combine", combine, {"TOPK": topk, **LAUNCH["combine"].constexprs}
        ),
        entry("route[bias]", _route, "route", route, {**choice, "tid2eid": None}),
        entry("route[hash]", _route, "route", route, {**choice, "bias": None}),
    ]


AOT = _aot()
