"""Triton linears: one weight-streaming kernel in three precisions, plus quantiser and RMSNorm.

In decode every weight byte is read once, so the weight tile is the wide operand of the mma
([BN, BK] x [BK, BM] with few rows BM) and K is split over programs by a rule of (N, K) alone.
"""

import torch
import triton
import triton.language as tl

from dspark.kernels.common.arrivals import arrival_counters, last_to_arrive
from dspark.kernels.common.fp8 import AMAX_FLOOR, FP8_MAX
from dspark.kernels.common.fp8_kernel import to_e4m3
from dspark.kernels.common.launch_table import LaunchConfig
from dspark.kernels.common.swiglu_kernel import swiglu_values
from dspark.kernels.linear.types import Fp8Weight

BLOCK_K = 128  # one weight scale, one activation scale
FEW_ROWS = 16
DECODE_ROWS = 64  # up to here K is split over programs, which quantise their own activations

LAUNCH = {
    "fp8.few": LaunchConfig(4, 4, {"BM": 16, "BN": 64}),
    "fp8.many": LaunchConfig(8, 3, {"BM": 64, "BN": 64}),
    "bf16.few": LaunchConfig(4, 4, {"BM": 16, "BN": 64}),
    "bf16.many": LaunchConfig(4, 3, {"BM": 64, "BN": 64}),
    "act_quant": LaunchConfig(4, 1, {"BM": 4}),
    "rms_norm": LaunchConfig(4, 1, {}),
    "swiglu": LaunchConfig(4, 1, {"BLOCK": 1024}),
}


@triton.jit
def _quantise(x, FLOOR: tl.constexpr, LIMIT: tl.constexpr, POW2: tl.constexpr):
    """f32 [BM, GROUP] -> e4m3 [BM, GROUP] and its scale f32 [BM], one group per row."""
    amax = tl.maximum(tl.max(tl.abs(x), 1), FLOOR)
    if POW2:
        # 448 = 1.75 * 2^8, so 2^ceil(log2(amax/448)) is the exponent of amax, one more when the
        # mantissa exceeds 1.75, minus 8; its inverse is exact too. No division, no logarithm.
        bits = ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000) - (8 << 23)
        scale = bits.to(tl.float32, bitcast=True)
        scaled = x * ((254 << 23) - bits).to(tl.float32, bitcast=True)[:, None]
    else:
        scale = tl.div_rn(amax, LIMIT)
        scaled = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    return to_e4m3(scaled), scale


@triton.jit
def _act_quant(
    x,
    q,
    scales,
    rows,
    x_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    POW2: tl.constexpr,
    FLOOR: tl.constexpr,
    LIMIT: tl.constexpr,
    BM: tl.constexpr,
):
    """program = (group, BM rows)"""
    group = tl.program_id(0)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    k = group * GROUP + tl.arange(0, GROUP)
    inside = (row < rows)[:, None] & (k < K)[None, :]
    row = row.to(tl.int64)
    values = tl.load(x + row[:, None] * x_stride + k[None, :], mask=inside, other=0.0)
    codes, scale = _quantise(values.to(tl.float32), FLOOR, LIMIT, POW2)
    tl.store(q + row[:, None] * K + k[None, :], codes, mask=inside)
    tl.store(scales + row * tl.cdiv(K, GROUP) + group, scale, mask=row < rows)


@triton.jit
def _swiglu(gate_up, out, count, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    source = gate_up + (at // WIDTH) * (2 * WIDTH) + at % WIDTH
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + WIDTH, mask=inside, other=0.0)
    tl.store(out + at, swiglu_values(gate, up, limit).to(out.dtype.element_ty), mask=inside)


# `rows` of 1 must stay a run-time value: as a constant it would be another binary.
@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,  # bf16 [T, groups, K], e4m3 codes when x_scales is given, f32 [T, 2*K] when limit is
    x_scales,  # f32 [T, K/128] or None
    limit,  # clamp of the SwiGLU that makes the activation from gate and up, or None
    w,  # e4m3 or bf16 [groups*width, K]
    w_scales,  # f32 [groups*width/128, K/128] for e4m3
    y,  # out [T, groups*width]
    partials,  # f32 [GRID_SPLITS, T, groups*width] when GRID_SPLITS > 1
    arrivals,
    rows,
    width,  # outputs of one group
    groups,
    x_stride,  # elements between rows of x
    second,  # first output of the second of several matrices stacked in w, or None
    third,  # of the third; `width` when there are two
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    GRID_SPLITS: tl.constexpr,
    W8A8: tl.constexpr,
    FLOOR: tl.constexpr,
    LIMIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """program = (BN outputs of a group and BM rows, split, group).

    The outputs of stacked matrices lie in y one after another, [T, outputs] each.
    K is summed in SPLITS fixed parts, by as many programs (decode) or by one (prefill).
    """
    blocks = tl.cdiv(width, BN)
    block = tl.program_id(0) % blocks
    row_block = tl.program_id(0) // blocks
    split = tl.program_id(1)
    group = tl.program_id(2)
    n = block * BN + tl.arange(0, BN)
    m = row_block * BM + tl.arange(0, BM)
    column = tl.arange(0, BK)
    # Rows past the end repeat the last one; only their store is masked.
    weight_row = group * width + tl.minimum(n, width - 1)
    row = tl.minimum(m, rows - 1)
    x_tile = x + (row.to(tl.int64)[:, None] * x_stride + group * K + column[None, :])
    w_tile = w + (weight_row.to(tl.int64)[:, None] * K + column[None, :])
    is_fp8: tl.constexpr = w.dtype.element_ty == tl.float8e4nv
    if is_fp8:
        blocks_k: tl.constexpr = (K + 127) // 128
        w_scale = w_scales + (group * width + block * BN) // 128 * blocks_k
        if x_scales is not None:
            x_scale = x_scales + row * blocks_k
    steps: tl.constexpr = ((K + BK - 1) // BK) // SPLITS

    total = tl.zeros((BN, BM), tl.float32)
    for own in range(SPLITS // GRID_SPLITS):
        acc = tl.zeros((BN, BM), tl.float32)
        for step in range(steps):
            at = (split + own) * steps + step
            if K % BK == 0:
                a = tl.load(x_tile + at * BK)
                b = tl.load(w_tile + at * BK)
                if limit is not None:
                    up = tl.load(x_tile + K + at * BK)
            else:
                inside = (at * BK + column < K)[None, :]
                a = tl.load(x_tile + at * BK, mask=inside, other=0.0)
                b = tl.load(w_tile + at * BK, mask=inside, other=0.0)
                if limit is not None:
                    up = tl.load(x_tile + K + at * BK, mask=inside, other=0.0)
            if limit is not None:
                a = swiglu_values(a, up, limit).to(tl.bfloat16)
            if not is_fp8:
                acc = tl.dot(b, a.T, acc)
            elif not W8A8:
                acc += tl.dot(b.to(tl.bfloat16), a.T) * tl.load(w_scale + at)
            elif x_scales is None:
                codes, a_scale = _quantise(a.to(tl.float32), FLOOR, LIMIT, True)
                acc += tl.dot(b, codes.T) * (a_scale * tl.load(w_scale + at))[None, :]
            else:
                a_scale = tl.load(x_scale + at) * tl.load(w_scale + at)
                acc += tl.dot(b, a.T) * a_scale[None, :]
        total += acc

    outputs = groups * width
    at = m.to(tl.int64)[None, :] * outputs + (group * width + n)[:, None]
    if second is None:
        y_at = at
    else:
        # Parts are whole multiples of BN, so all outputs of a program belong to one matrix.
        in_first = block * BN < second
        in_second = block * BN < third
        begin = tl.where(in_first, 0, tl.where(in_second, second, third))
        end = tl.where(in_first, second, tl.where(in_second, third, width))
        y_at = m.to(tl.int64)[None, :] * (end - begin) + (n - begin)[:, None]
        y += begin.to(tl.int64) * rows
    inside = (m < rows)[None, :] & (n < width)[:, None]
    if GRID_SPLITS > 1:
        stride = rows.to(tl.int64) * outputs
        tl.store(partials + split * stride + at, total, mask=inside)
        if last_to_arrive(arrivals + tl.program_id(0) + group * tl.num_programs(0), GRID_SPLITS):
            total = tl.zeros((BN, BM), tl.float32)
            for s in tl.static_range(GRID_SPLITS):
                total += tl.load(
                    partials + s * stride + at, mask=inside, other=0.0, cache_modifier=".cg"
                )
            tl.store(y + y_at, total.to(y.dtype.element_ty), mask=inside)
    else:
        tl.store(y + y_at, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm(x, w, y, eps, width, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < width
    value = tl.load(x + row * x_stride + n, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(w + n, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    tl.store(y + row * width + n, (value * scale * weight).to(y.dtype.element_ty), mask=inside)


def split_k(outputs: int, k: int) -> int:
    """Parts in which K is summed: fills the GPU in decode, and depends on the matrix alone."""
    splits = 1
    while (
        splits < 16
        and k // (2 * splits) >= 256
        and (k // BLOCK_K) % (2 * splits) == 0
        and triton.cdiv(outputs, 64) * 2 * splits <= 192
    ):
        splits *= 2
    return splits


def act_quant(x, group=BLOCK_K, pow2=True):
    rows, k = x.shape
    q = torch.empty(rows, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, triton.cdiv(k, group), dtype=torch.float32, device=x.device)
    if rows:
        launch = LAUNCH["act_quant"]
        _act_quant[(triton.cdiv(k, group), triton.cdiv(rows, launch.constexprs["BM"]))](
            x,
            q,
            scales,
            rows,
            x.stride(0),
            K=k,
            GROUP=group,
            POW2=pow2,
            FLOOR=AMAX_FLOOR,
            LIMIT=FP8_MAX,
            **launch.keywords,
        )
    return q, scales


def fp8_linear(x, w, out_dtype=None):
    return _fp8(x, w, out_dtype)


def fp8_linear_parts(x, w, parts, out_dtype=None):
    return _apart(_fp8(x, w, out_dtype, parts), parts)


def bf16_linear(x, w, out_dtype=None):
    return _launch(x.unsqueeze(1), None, w, out_dtype)


def bf16_linear_parts(x, w, parts, out_dtype=None):
    return _apart(_launch(x.unsqueeze(1), None, w, out_dtype, parts=parts), parts)


def grouped_linear(o, w):
    return _launch(o, None, w, None)


def swiglu_linear(gate_up, w, limit, *, act_dtype, out_dtype=None):
    if gate_up.shape[0] > DECODE_ROWS:
        return fp8_linear(swiglu(gate_up, limit, out_dtype=act_dtype), w, out_dtype)
    out_dtype = out_dtype or act_dtype
    return _launch(gate_up.unsqueeze(1), None, w, out_dtype, w8a8=True, limit=limit)


def swiglu(gate_up, limit, *, out_dtype):
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=out_dtype, device=gate_up.device)
    if out.numel():
        launch = LAUNCH["swiglu"]
        _swiglu[(triton.cdiv(out.numel(), launch.constexprs["BLOCK"]),)](
            gate_up, out, out.numel(), limit, width, **launch.keywords
        )
    return out


def _fp8(x, w, out_dtype, parts=None):
    scales = None
    if x.shape[0] > DECODE_ROWS:
        x, scales = act_quant(x)
        out_dtype = out_dtype or torch.bfloat16
    return _launch(x.unsqueeze(1), scales, w, out_dtype, w8a8=True, parts=parts)


def _apart(y, parts):
    """The outputs [T, part] of stacked matrices, which lie one after another in y's memory."""
    rows = y.shape[0]
    blocks = y.view(-1).split([rows * part for part in parts])
    return tuple(block.view(rows, part) for block, part in zip(blocks, parts, strict=True))


def _launch(x, x_scales, w, out_dtype, w8a8=False, limit=None, parts=None):
    """x [T, groups, K]; rows may be strided, as slices of a wider projection are."""
    rows, groups = x.shape[:2]
    k = w[0].shape[1]
    if x.stride(2) != 1 or (groups > 1 and x.stride(1) != k):
        x = x.contiguous()
    matrix = w[0]
    outputs = matrix.shape[0]
    width = outputs // groups
    y = torch.empty(rows, outputs, dtype=out_dtype or x.dtype, device=x.device)
    if rows == 0:
        return y
    splits = split_k(outputs, k)
    grid_splits = splits if rows <= DECODE_ROWS else 1
    kind = "fp8" if isinstance(w, Fp8Weight) else "bf16"
    # Gate and up in f32 are too large for a tall tile on Ada.
    few = rows <= FEW_ROWS or limit is not None
    launch = LAUNCH[f"{kind}.{'few' if few else 'many'}"]
    block_m, block_n = launch.constexprs["BM"], launch.constexprs["BN"]
    second = third = None
    if parts is not None:
        second, third = parts[0], sum(parts[:2])
    partials = None
    if grid_splits > 1:
        partials = torch.empty(grid_splits, rows, outputs, dtype=torch.float32, device=x.device)
    _linear[(triton.cdiv(width, block_n) * triton.cdiv(rows, block_m), grid_splits, groups)](
        x,
        x_scales,
        limit,
        matrix,
        w.scales if isinstance(w, Fp8Weight) else None,
        y,
        partials,
        arrival_counters(x.device),
        rows,
        width,
        groups,
        x.stride(0),
        second,
        third,
        K=k,
        SPLITS=splits,
        GRID_SPLITS=grid_splits,
        W8A8=w8a8,
        FLOOR=AMAX_FLOOR,
        LIMIT=FP8_MAX,
        BK=BLOCK_K,
        **launch.keywords,
    )
    return y


def rms_norm(x, w, eps):
    width = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat = x.reshape(-1, width)  # a view of row slices, a copy of anything stranger
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    if flat.shape[0]:
        _rms_norm[(flat.shape[0],)](
            flat,
            w,
            y,
            eps,
            width,
            flat.stride(0),
            BLOCK=triton.next_power_of_2(width),
            **LAUNCH["rms_norm"].keywords,
        )
    return y
