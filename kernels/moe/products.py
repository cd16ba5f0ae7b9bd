"""Products of bf16 rows with MXFP4 weights, for the kernels of `kernel.py`.

Weights stream through shared memory as packed words (`words.py`) and become bf16 in registers,
right before the mma. Whatever the tile, the same products are added in the same order.
"""

import triton
import triton.language as tl

from dspark.kernels.common.dispatch import INTERPRETED
from dspark.kernels.moe.words import TILE_ROWS

_INTERPRETED = tl.constexpr(INTERPRETED)
TILE = tl.constexpr(TILE_ROWS)


@triton.jit
def _decoded(words, scale):
    """Words i32 and scales (bf16 bits in both halves of u32) -> four pairs of bf16 weights.

    Rotated by 0, 3 and 6 bits a word shows the sign of a pair of codes at bit 15 and the magnitude
    at bits 8..6 of either half; a multiplication gathers the fourth pair, whose bits fill the gaps.
    Read as bf16 that is value * 2^-126, 0.5 being a subnormal, and the scale brings the 2^126.
    `words.py` lays the bits out. Asm because LLVM would shuffle the halves before and after the
    multiplication; sm_89 multiplies bf16 only as fma.
    """
    if _INTERPRETED:
        bits = words.to(tl.uint32, bitcast=True)
        first = _scaled_pair(bits, scale)
        second = _scaled_pair((bits >> 3) | (bits << 29), scale)
        third = _scaled_pair((bits >> 6) | (bits << 26), scale)
        fourth = _scaled_pair((bits & 0x001B001B) * 0x1084, scale)
        return first + second + third + fourth
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 pair, zero;
            mov.b32 zero, 0x80008000;  // -0 twice
            and.b32 pair, $8, 0x81C081C0;
            fma.rn.bf16x2 pair, pair, $9, zero;
            mov.b32 {$0, $1}, pair;
            shf.r.wrap.b32 pair, $8, $8, 3;
            and.b32 pair, pair, 0x81C081C0;
            fma.rn.bf16x2 pair, pair, $9, zero;
            mov.b32 {$2, $3}, pair;
            shf.r.wrap.b32 pair, $8, $8, 6;
            and.b32 pair, pair, 0x81C081C0;
            fma.rn.bf16x2 pair, pair, $9, zero;
            mov.b32 {$4, $5}, pair;
            and.b32 pair, $8, 0x001B001B;
            mul.lo.u32 pair, pair, 0x1084;
            and.b32 pair, pair, 0x81C081C0;
            fma.rn.bf16x2 pair, pair, $9, zero;
            mov.b32 {$6, $7}, pair;
        }""",
        "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r",
        [words, scale],
        dtype=(
            tl.uint16,
            tl.uint16,
            tl.uint16,
            tl.uint16,
            tl.uint16,
            tl.uint16,
            tl.uint16,
            tl.uint16,
        ),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _scaled_pair(bits, scale):
    """What one multiplication of `_decoded` computes: bf16 bits (u16) of the low and high half."""
    placed = bits & 0x81C081C0
    factor = scale.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    low = placed.to(tl.uint16).to(tl.bfloat16, bitcast=True) * factor
    high = (placed >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True) * factor
    return low.to(tl.uint16, bitcast=True), high.to(tl.uint16, bitcast=True)


@triton.jit
def _columns(low, high, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """Bits of even and odd columns u16 [ROWS, groups, 4] -> bf16 [ROWS, COUNT]."""
    return tl.join(low, high).to(tl.bfloat16, bitcast=True).reshape(ROWS, COUNT)


@triton.jit
def _weights(
    words,  # all words of a matrix
    scales,  # and its scales
    at,  # [BN, 1]: rows in one block of BK columns, see `place`
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """One block of weight rows, as four bf16 [BN, BK/4]: a quarter of every group of columns."""
    GROUPS: tl.constexpr = BK // 32
    QUARTER: tl.constexpr = BK // 4
    word = tl.load(words + (at * (BK // 8) + tl.arange(0, BK // 8)[None, :]))
    scale = tl.load(scales + (at * GROUPS + tl.arange(0, GROUPS)[None, :])).to(tl.uint32)
    scale = (scale * 0x00800080)[:, :, None].broadcast_to(BN, GROUPS, 4)
    a, b, c, d, e, f, g, h = _decoded(word.reshape(BN, GROUPS, 4), scale)
    return (
        _columns(a, b, BN, QUARTER),
        _columns(c, d, BN, QUARTER),
        _columns(e, f, BN, QUARTER),
        _columns(g, h, BN, QUARTER),
    )


@triton.jit
def _quarter(rows, filled, block, QUARTER: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """A quarter of every group of a block of columns of activation rows: bf16 [BM, BK/4].

    rows: pointers [BM, 1]; filled: [BM, 1], which of them exist. Columns from K on are 0.
    """
    # An mma takes its operands in fours of columns: below 32 Triton would count columns twice.
    tl.static_assert(BK >= 128)
    i = tl.arange(0, BK // 4)[None, :]
    column = block * BK + i // 8 * 32 + QUARTER * 8 + i % 8
    if K % BK != 0:
        filled = filled & (column < K)
    return tl.load(rows + column, mask=filled, other=0.0)


@triton.jit
def products(
    rows,  # pointers [BM, 1] to activation rows
    filled,  # [BM, 1]: which of them exist
    words,
    scales,
    at,  # [BN, 1]: weight rows in their first block
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """f32 [BN, BM]: products over K columns, each of SPLITS parts summed apart."""
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    acc = tl.zeros((BN, BM), tl.float32)
    total = acc
    # One loop over all parts: the next part's weights are on their way when a part ends.
    for block in range(BLOCKS):
        w0, w1, w2, w3 = _weights(words, scales, at + block * TILE, BN, BK)
        acc = tl.dot(w0, _quarter(rows, filled, block, 0, K, BK).T, acc)
        acc = tl.dot(w1, _quarter(rows, filled, block, 1, K, BK).T, acc)
        acc = tl.dot(w2, _quarter(rows, filled, block, 2, K, BK).T, acc)
        acc = tl.dot(w3, _quarter(rows, filled, block, 3, K, BK).T, acc)
        if SPLITS > 1:
            ends = (block + 1) % (BLOCKS // SPLITS) == 0
            total = tl.where(ends, total + acc, total)
            acc = tl.where(ends, 0.0, acc)
    return total if SPLITS > 1 else acc


@triton.jit
def place(expert, row, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Where row `row` of an expert's matrix of ROWS rows has its first block of columns."""
    tile = expert.to(tl.int64) * (ROWS // TILE) + row // TILE
    return (tile * BLOCKS * TILE + row % TILE)[:, None]


@triton.jit
def add_1(total, parts, ROWS: tl.constexpr):
    """total [ROWS] + parts [1, ROWS]; `add_2`, `add_4`, `add_8` likewise, first to last."""
    return total + parts.reshape(ROWS)


@triton.jit
def add_2(total, parts, ROWS: tl.constexpr):
    first, second = tl.split(parts.reshape(2, ROWS).permute(1, 0))
    return total + first + second


@triton.jit
def add_4(total, parts, ROWS: tl.constexpr):
    first, second = tl.split(parts.reshape(2, 2, ROWS).permute(1, 2, 0))
    return add_2(add_2(total, first, ROWS), second, ROWS)


@triton.jit
def add_8(total, parts, ROWS: tl.constexpr):
    first, second = tl.split(parts.reshape(2, 4, ROWS).permute(1, 2, 0))
    return add_4(add_4(total, first, ROWS), second, ROWS)


ADD_IN_ORDER = {1: add_1, 2: add_2, 4: add_4}
