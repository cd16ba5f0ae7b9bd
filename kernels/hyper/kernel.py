"""Triton hyper-connections: a split projection of the four streams, then one small program a row.

fn is f32 and stays so: products run in f32 FMA, not tf32, because they steer the whole residual.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.common.launch_table import LaunchConfig
from dspark.kernels.hyper.reference import STREAMS
from dspark.kernels.hyper.types import HyperNumbers, HyperSite, MhcPre

LAUNCH = {
    "project.decode": LaunchConfig(4, 1, {"BM": 2}),
    "project.prefill": LaunchConfig(4, 1, {"BM": 16}),
    "mix": LaunchConfig(8, 1, {}),
    "post": LaunchConfig(4, 1, {"BLOCK": 512}),
}
SPLIT_COLUMNS = 32  # hidden columns (of all four streams) per partial sum
PARTIAL_WIDTH = 32  # up to 24 outputs; the sum of squares sits in the last place
DECODE_ROWS = 64


@triton.jit
def _new_stream(f, x, post, comb, row, column, stream, hidden, inside):
    """New values of `stream` at `column`, f32; old streams are added in ascending order."""
    value = tl.load(f + row.to(tl.int64) * hidden + column, mask=inside, other=0.0)
    total = tl.load(post + row * 4 + stream) * value.to(tl.float32)
    for old in tl.static_range(4):
        source = x + (row.to(tl.int64) * 4 + old) * hidden + column
        value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(comb + row * 16 + old * 4 + stream) * value
    return total


@triton.jit
def _project(
    x,  # bf16 [T, 4, hidden]: the streams, or the old ones when f is given
    fn,  # f32 [OUTPUTS, 4*hidden]
    partials,  # out f32 [splits, T, WIDTH]
    f,  # bf16 [T, hidden] sublayer output to write back first, or None
    post,  # f32 [T, 4] and
    comb,  # f32 [T, 4, 4] of that sublayer
    streams,  # out bf16 [T, 4, hidden]: the new streams
    rows,
    hidden,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BH: tl.constexpr,
):
    """program = (BM rows, BH hidden columns of all four streams). fn stays in registers."""
    split = tl.program_id(1)
    first_row = tl.program_id(0) * BM
    k = tl.arange(0, 4 * BH)
    stream = k // BH
    column = split * BH + k % BH
    output = tl.arange(0, WIDTH)
    wanted = (output < OUTPUTS)[:, None] & (column < hidden)[None, :]
    at = output[:, None] * (4 * hidden) + (stream * hidden + column)[None, :]
    weight = tl.load(fn + at, mask=wanted, other=0.0)
    for i in tl.static_range(BM):
        row = first_row + i
        inside = (row < rows) & (column < hidden)
        at = (row.to(tl.int64) * 4 + stream) * hidden + column
        if f is None:
            value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        else:
            last = tl.minimum(row, rows - 1)
            new = _new_stream(f, x, post, comb, last, column, stream, hidden, inside)
            rounded = new.to(streams.dtype.element_ty)
            tl.store(streams + at, rounded, mask=inside)
            value = rounded.to(tl.float32)
        products = tl.sum(weight * value[None, :], 1)
        products = tl.where(output == WIDTH - 1, tl.sum(value * value), products)
        tl.store(partials + (split * rows + row) * WIDTH + output, products, mask=row < rows)


@triton.jit
def _total(
    partials,
    row,
    rows,
    first,
    splits,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """f32 [COUNT]: partial sums `first`.. of a row added over the splits."""
    split = tl.arange(0, SPLITS)
    at = (split * rows + row)[:, None] * WIDTH + first + tl.arange(0, COUNT)[None, :]
    return tl.sum(tl.load(partials + at, mask=(split < splits)[:, None], other=0.0), 0)


@triton.jit
def _inverse_rms(
    partials, row, rows, hidden, splits, eps, WIDTH: tl.constexpr, SPLITS: tl.constexpr
):
    square = tl.sum(_total(partials, row, rows, WIDTH - 1, splits, WIDTH, 1, SPLITS))
    return tl.rsqrt(square / (4 * hidden) + eps)


@triton.jit
def _add_stream(mixed, pre, value, stream: tl.constexpr):
    share = tl.sum(tl.where(tl.arange(0, 4) == stream, pre, 0.0))
    return mixed + share * value.to(tl.float32)


@triton.jit
def _mix(
    x,  # bf16 [T, 4, hidden]
    partials,
    scale,  # f32 [3] or [1]
    base,  # f32 [24] or [4]
    norm_w,  # [hidden], or None to leave the mix unnormalised
    y,  # out bf16 [T, hidden]
    post,  # out f32 [T, 4]
    comb,  # out f32 [T, 4, 4]
    rows,
    hidden,
    splits,
    eps_norm,
    eps_hc,
    iters,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """program = (row, part): part 0 mixes the streams, part 1 makes post and comb meanwhile."""
    row = tl.program_id(0)
    four = tl.arange(0, 4)
    if tl.program_id(1) == 0:
        n = tl.arange(0, BLOCK)
        inside = n < hidden
        # Loaded before the sums that decide their shares: one wait for memory instead of two.
        source = x + row.to(tl.int64) * 4 * hidden + n
        value0 = tl.load(source, mask=inside, other=0.0)
        value1 = tl.load(source + hidden, mask=inside, other=0.0)
        value2 = tl.load(source + 2 * hidden, mask=inside, other=0.0)
        value3 = tl.load(source + 3 * hidden, mask=inside, other=0.0)
        if norm_w is not None:
            weight = tl.load(norm_w + n, mask=inside, other=0.0).to(tl.float32)
        inverse_rms = _inverse_rms(partials, row, rows, hidden, splits, eps_norm, WIDTH, SPLITS)
        z = _total(partials, row, rows, 0, splits, WIDTH, 4, SPLITS) * inverse_rms
        pre = tl.sigmoid(z * tl.load(scale) + tl.load(base + four)) + eps_hc
        mixed = tl.zeros((BLOCK,), tl.float32)
        mixed = _add_stream(mixed, pre, value0, 0)
        mixed = _add_stream(mixed, pre, value1, 1)
        mixed = _add_stream(mixed, pre, value2, 2)
        mixed = _add_stream(mixed, pre, value3, 3)
        rounded = mixed.to(tl.bfloat16)
        if norm_w is not None:
            value = rounded.to(tl.float32)
            norm = tl.rsqrt(tl.sum(value * value) / hidden + eps_norm)
            rounded = (value * norm * weight).to(tl.bfloat16)
        tl.store(y + row.to(tl.int64) * hidden + n, rounded, mask=inside)
    else:
        if comb is not None:  # the head has no way back into the streams
            inverse_rms = _inverse_rms(partials, row, rows, hidden, splits, eps_norm, WIDTH, SPLITS)
            post_z = _total(partials, row, rows, 4, splits, WIDTH, 4, SPLITS) * inverse_rms
            gate = tl.sigmoid(post_z * tl.load(scale + 1) + tl.load(base + 4 + four))
            tl.store(post + row * 4 + four, 2.0 * gate)
            lane = tl.arange(0, 16)
            comb_z = _total(partials, row, rows, 8, splits, WIDTH, 16, SPLITS) * inverse_rms
            logits = (comb_z * tl.load(scale + 2) + tl.load(base + 8 + lane)).reshape(4, 4)
            a = tl.exp(logits - tl.max(logits, 1)[:, None])
            a = a / tl.sum(a, 1)[:, None] + eps_hc
            a = a * (1.0 / (tl.sum(a, 0) + eps_hc))[None, :]
            for _ in range(iters - 1):
                a = a * (1.0 / (tl.sum(a, 1) + eps_hc))[:, None]
                a = a * (1.0 / (tl.sum(a, 0) + eps_hc))[None, :]
            tl.store(comb + row * 16 + four[:, None] * 4 + four[None, :], a)


@triton.jit
def _post(f, x, post, comb, out, hidden, BLOCK: tl.constexpr):
    """program = (row, BLOCK columns)"""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < hidden
    for stream in tl.static_range(4):
        total = _new_stream(f, x, post, comb, row, n, stream, hidden, inside)
        at = (row.to(tl.int64) * 4 + stream) * hidden + n
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _mean(x, out, hidden, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for stream in tl.static_range(4):
        source = x + (row * 4 + stream) * hidden + n
        total += tl.load(source, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + n, (total * 0.25).to(out.dtype.element_ty), mask=inside)


def mhc_pre(x, site, norm_w, numbers):
    return _run_site(x, None, site, norm_w, numbers)[1]


def mhc_post_pre(f, x, post, comb, site, norm_w, numbers):
    return _run_site(x, PutBack(f, post, comb), site, norm_w, numbers)


def mhc_head(x, site, numbers):
    return _run_site(x, None, site, None, numbers._replace(iters=0))[1].y


class PutBack(NamedTuple):
    """The output of a sublayer and the weights that put it back into the streams."""

    f: Tensor
    post: Tensor
    comb: Tensor


def _run_site(
    x: Tensor,
    back: PutBack | None,
    site: HyperSite,
    norm_w: Tensor | None,
    numbers: HyperNumbers,
) -> tuple[Tensor, MhcPre]:
    """Streams (after writing `back` into them, if given) and MhcPre of a site or of the head."""
    rows, _, hidden = x.shape
    is_site = norm_w is not None
    put_back = (
        torch.empty(rows, STREAMS, dtype=torch.float32, device=x.device),
        torch.empty(rows, STREAMS, STREAMS, dtype=torch.float32, device=x.device),
    )
    out = MhcPre(
        torch.empty(rows, hidden, dtype=x.dtype, device=x.device),
        *(put_back if is_site else (None, None)),  # type: ignore[arg-type]
    )
    f, post, comb = back or (None, None, None)
    fn = site.fn.fn
    streams = x if back is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows == 0:
        return streams, out
    splits = triton.cdiv(hidden, SPLIT_COLUMNS)
    shape = (splits, rows, PARTIAL_WIDTH)
    partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    launch = LAUNCH["project.decode" if rows <= DECODE_ROWS else "project.prefill"]
    _project[(triton.cdiv(rows, launch.constexprs["BM"]), splits)](
        x,
        fn,
        partials,
        f,
        post,
        comb,
        None if back is None else streams,
        rows,
        hidden,
        OUTPUTS=fn.shape[0],
        WIDTH=PARTIAL_WIDTH,
        BH=SPLIT_COLUMNS,
        **launch.keywords,
    )
    _mix[(rows, 2 if is_site else 1)](
        streams,
        partials,
        site.scale,
        site.base,
        norm_w,
        out.y,
        out.post,
        out.comb,
        rows,
        hidden,
        splits,
        *numbers,
        WIDTH=PARTIAL_WIDTH,
        SPLITS=triton.next_power_of_2(splits),
        BLOCK=triton.next_power_of_2(hidden),
        **LAUNCH["mix"].keywords,
    )
    return streams, out


def mhc_post(f, x, post, comb):
    rows, _, hidden = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        launch = LAUNCH["post"]
        _post[(rows, triton.cdiv(hidden, launch.constexprs["BLOCK"]))](
            f, x, post, comb, out, hidden, **launch.keywords
        )
    return out


def stream_mean(x):
    rows, _, hidden = x.shape
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    if rows:
        launch = LAUNCH["post"]
        _mean[(rows, triton.cdiv(hidden, launch.constexprs["BLOCK"]))](
            x, out, hidden, **launch.keywords
        )
    return out
