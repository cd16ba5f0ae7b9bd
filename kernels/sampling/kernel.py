"""Triton kernels of the sampling ops.

`cut_tails` finds the last token that stays by its bits: 32 bits of a logit, in an order where
larger floats come first, in three digits of 11, 11 and 10. Per digit one launch counts the tokens
and adds up the weights of every value the digit takes, among the tokens that agree in the digits
before; the next launch picks from these sums the digit that the last token has. Counts and weights
are integers, so the atomic additions may come in any order.
"""

import torch
import triton
import triton.language as tl

from dspark.kernels.common import elementary
from dspark.kernels.common.argmax_kernel import NOTHING, pack
from dspark.kernels.common.elementary_kernel import log, weight
from dspark.kernels.common.launch_table import LaunchConfig
from dspark.kernels.common.rng_kernel import TOKEN, gumbel, stream
from dspark.kernels.sampling.types import Cut

LAUNCH = {
    "choose": LaunchConfig(4, 1, {"BLOCK": 1024}),
    "row_top": LaunchConfig(4, 1, {"BLOCK": 2048}),
    "tally": LaunchConfig(4, 1, {"BLOCK": 1024}),
    "last_token": LaunchConfig(4, 1, {"BLOCK": 2048}),
}

CHUNK = 8192  # tokens of one program
SLAB = 64  # rows whose sums are held at once: 74 KB each
BINS = tl.constexpr(2048)
LEVELS = 3
UNIT = tl.constexpr(elementary.UNIT)
LOG2_E = tl.constexpr(elementary.LOG2_E)


@triton.jit
def _logit(logits, at, mask):
    """f32 logits; -0 is 0, and NaN counts as -inf."""
    x = tl.load(logits + at, mask=mask, other=-float("inf")) + 0.0
    return tl.where(x == x, x, -float("inf"))


@triton.jit
def _choose(
    logits, temperature, seed, position, value, last, best, vocab, chunks, rows_each,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the best packed (key, id) of the chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r = row // rows_each
    t = tl.load(temperature + r)
    a, b = stream(tl.load(seed + r), tl.load(position + r) + row % rows_each, TOKEN)
    end = tl.minimum((chunk + 1) * CHUNK, vocab)
    packed = tl.full([BLOCK], NOTHING, tl.int64)
    for first in range(chunk * CHUNK, end, BLOCK):
        i = first + tl.arange(0, BLOCK)
        key = _logit(logits, row * vocab + i, i < end)
        if value is not None:
            v = tl.load(value + row)
            stays = (key > v) | ((key == v) & (i <= tl.load(last + row)))
            key = tl.where(stays, key, -float("inf"))
        if t > 0:
            key += t * gumbel(a, b, i)
        packed = tl.maximum(packed, pack(key, i))
    tl.store(best + row * chunks + chunk, tl.max(packed, 0))


@triton.jit
def _row_top(logits, top, vocab, chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, chunk): the largest logit of the chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.minimum((chunk + 1) * CHUNK, vocab)
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(chunk * CHUNK, end, BLOCK):
        i = first + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, _logit(logits, row * vocab + i, i < end))
    tl.store(top + row * chunks + chunk, tl.max(highest, 0))


@triton.jit
def _top_of_row(top, row, chunks):
    m = -float("inf")
    for c in range(chunks):
        m = tl.maximum(m, tl.load(top + row * chunks + c))
    return m


@triton.jit
def _rank_bits(x):
    """u32 in the order of the floats, the largest first."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF) ^ 0x7FFFFFFF).to(tl.uint32, bitcast=True)


@triton.jit
def _from_rank_bits(rank):
    ordered = rank.to(tl.int32, bitcast=True) ^ 0x7FFFFFFF
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _is_counted(t, k, p, vocab):
    """Whether top-k or top-p can cut anything; otherwise nothing needs to be counted."""
    return (t > 0) & ((k < vocab) | (p < 1.0))


@triton.jit
def _descend(count, mass, slab_row, state, k, p, LEVEL: tl.constexpr):
    """The digit of the last token that stays, from the sums of one level.

    Returns (digit or -1 if there is no token, tokens before its bin, weight before its bin, limit
    of the weight before a token that stays).
    """
    bins = tl.arange(0, BINS)
    n = tl.load(count + bins)
    m = tl.load(mass + bins)
    if LEVEL == 0:
        n_outside = tl.full([], 0, tl.int64)
        m_outside = tl.full([], 0, tl.int64)
        total = tl.sum(m, 0)
        steps = (p * 16777216.0).to(tl.int64)  # of 2^-24
        limit = (total >> 24) * steps + (((total & 0xFFFFFF) * steps) >> 24)
    else:
        n_outside = tl.load(state + slab_row * 4 + 1)
        m_outside = tl.load(state + slab_row * 4 + 2)
        limit = tl.load(state + slab_row * 4 + 3)
    n = n.to(tl.int64)
    n_before = n_outside + tl.cumsum(n, 0) - n
    m_before = m_outside + tl.cumsum(m, 0) - m
    stays = (n > 0) & (n_before < k) & (m_before <= limit)
    digit = tl.max(tl.where(stays, bins, -1), 0)
    n_outside += tl.sum(tl.where(bins < digit, n, 0), 0)
    m_outside += tl.sum(tl.where(bins < digit, m, 0), 0)
    return digit, n_outside, m_outside, limit


@triton.jit
def _tally(
    logits, temperature, top_k, top_p, top, count, mass, state, new_state, slab_start, slab_rows,
    vocab, chunks, rows_each,
    LEVEL: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row of the slab, chunk): add the chunk's tokens to the sums of a level.

    count, mass: [LEVELS, slab rows, BINS]. state: i64 [slab rows, 4] (digits so far, and what
    `_descend` returns of the level before): level 2 reads what level 1 wrote.
    """
    slab_row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = slab_start + slab_row
    r = row // rows_each
    t, k, p = tl.load(temperature + r), tl.load(top_k + r), tl.load(top_p + r)
    prefix = tl.full([], 0, tl.int64)
    if _is_counted(t, k, p, vocab):
        if LEVEL > 0:
            before = ((LEVEL - 1) * slab_rows + slab_row) * BINS
            digit, n_outside, m_outside, limit = _descend(
                count + before, mass + before, slab_row, state, k, p, LEVEL - 1
            )
            if LEVEL > 1:
                prefix = tl.load(state + slab_row * 4) * BINS
            prefix += digit
            if chunk == 0:
                tl.store(new_state + slab_row * 4, prefix)
                tl.store(new_state + slab_row * 4 + 1, n_outside)
                tl.store(new_state + slab_row * 4 + 2, m_outside)
                tl.store(new_state + slab_row * 4 + 3, limit)
        m = _top_of_row(top, slab_row, chunks)
        scale = tl.div_rn(1.0, tl.maximum(t, 1e-6)) * LOG2_E
        here = (LEVEL * slab_rows + slab_row) * BINS
        end = tl.minimum((chunk + 1) * CHUNK, vocab)
        for first in range(chunk * CHUNK, end, BLOCK):
            i = first + tl.arange(0, BLOCK)
            x = _logit(logits, row * vocab + i, i < end)
            rank = _rank_bits(x).to(tl.int64)
            if LEVEL == 0:
                at = rank >> 21
                inside = x > -float("inf")
            elif LEVEL == 1:
                at = (rank >> 10) & 0x7FF
                inside = (x > -float("inf")) & ((rank >> 21) == prefix)
            else:
                at = rank & 0x3FF
                inside = (x > -float("inf")) & ((rank >> 10) == prefix)
            w = tl.where(x == m, tl.full([], 1, tl.int64) << UNIT, weight((x - m) * scale))
            one = tl.full([BLOCK], 1, tl.int32)
            tl.atomic_add(count + here + at, one, mask=inside, sem="relaxed")
            tl.atomic_add(mass + here + at, w, mask=inside, sem="relaxed")


@triton.jit
def _last_token(
    logits, temperature, top_k, top_p, min_p, top, count, mass, state, value, last, slab_start,
    slab_rows, vocab, chunks, rows_each,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row of the slab): the cut of a row. state: as level 2 left it."""
    slab_row = tl.program_id(0).to(tl.int64)
    row = slab_start + slab_row
    r = row // rows_each
    t, k, p = tl.load(temperature + r), tl.load(top_k + r), tl.load(top_p + r)
    v = tl.full([], -float("inf"), tl.float32)
    final = tl.full([], 0, tl.int64) + vocab - 1
    if _is_counted(t, k, p, vocab):
        here = (2 * slab_rows + slab_row) * BINS
        digit, n_outside, m_outside, limit = _descend(
            count + here, mass + here, slab_row, state, k, p, 2
        )
        if digit >= 0:
            rank = tl.load(state + slab_row * 4) * 1024 + digit
            v = _from_rank_bits(rank.to(tl.uint32))
            equals = tl.load(count + here + digit).to(tl.int64)
            each = tl.load(mass + here + digit) // equals
            stay = tl.minimum(equals, k - n_outside)
            if each > 0:
                stay = tl.minimum(stay, (limit - m_outside) // each + 1)
            if stay < equals:
                final = _id_of_equal(logits, row, v, stay, vocab, BLOCK)
    smallest = tl.load(min_p + r)
    m = _top_of_row(top, slab_row, chunks)
    if (t > 0) & (smallest > 0) & (m > -float("inf")):
        at_least = m + t * log(tl.maximum(smallest, 1.1754943508222875e-38))
        if at_least > v:
            v = at_least
            final = tl.full([], 0, tl.int64) + vocab - 1
    tl.store(value + row, v)
    tl.store(last + row, final)


@triton.jit
def _id_of_equal(logits, row, v, place, vocab, BLOCK: tl.constexpr):
    """Id of the place-th token (from 1) whose logit equals v."""
    seen = tl.full([], 0, tl.int64)
    found = tl.full([], 0, tl.int64)
    for first in range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        equal = (_logit(logits, row * vocab + i, i < vocab) == v).to(tl.int64)
        nth = seen + tl.cumsum(equal, 0)
        hit = (equal > 0) & (nth == place)
        found = tl.maximum(found, tl.max(tl.where(hit, i.to(tl.int64), 0), 0))
        seen += tl.sum(equal, 0)
    return found


def choose(logits, temperature, seed, position, cut=None):
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    best = torch.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    value, last = (None, None) if cut is None else cut
    if rows:
        _choose[(rows, chunks)](
            logits.contiguous(), temperature, seed, position, value, last, best, vocab, chunks,
            rows // len(temperature), CHUNK=CHUNK, **LAUNCH["choose"].keywords,
        )  # fmt: skip
    return best.amax(1)


def cut_tails(logits, temperature, top_k, top_p, min_p):
    rows = logits.shape[0]
    logits = logits.contiguous()
    value = torch.empty(rows, dtype=torch.float32, device=logits.device)
    last = torch.empty(rows, dtype=torch.int64, device=logits.device)
    for start in range(0, rows, SLAB):
        _cut_slab(logits, temperature, top_k, top_p, min_p, value, last, start)
    return Cut(value, last)


def _cut_slab(logits, temperature, top_k, top_p, min_p, value, last, start):
    """Fill value and last for the rows from `start` on, SLAB of them at most."""
    vocab, rows_each = logits.shape[1], logits.shape[0] // len(temperature)
    rows, chunks = min(SLAB, logits.shape[0] - start), triton.cdiv(vocab, CHUNK)
    top = torch.empty(rows, chunks, device=logits.device)
    count = torch.zeros(LEVELS, rows, BINS.value, dtype=torch.int32, device=logits.device)
    mass = torch.zeros(LEVELS, rows, BINS.value, dtype=torch.int64, device=logits.device)
    state = torch.empty(LEVELS, rows, 4, dtype=torch.int64, device=logits.device)
    _row_top[(rows, chunks)](
        logits[start:], top, vocab, chunks, CHUNK=CHUNK, **LAUNCH["row_top"].keywords
    )
    for level in range(LEVELS):
        _tally[(rows, chunks)](
            logits, temperature, top_k, top_p, top, count, mass, state[max(0, level - 1)],
            state[level], start, rows, vocab, chunks, rows_each, LEVEL=level, CHUNK=CHUNK,
            **LAUNCH["tally"].keywords,
        )  # fmt: skip
    _last_token[(rows,)](
        logits, temperature, top_k, top_p, min_p, top, count, mass, state[-1], value, last, start,
        rows, vocab, chunks, rows_each, **LAUNCH["last_token"].keywords,
    )  # fmt: skip
