"""Triton kernels of the sum through host memory: one launch publishes, waits and adds.

Memory order, for one program of rank r and the others' programs of the same channel:
1. All threads store what they publish. A barrier; then one thread releases the flag of r to the
   system: whoever sees the flag sees what the whole program stored before the barrier.
2. Lane q of the first warp acquires the flag of rank q, again and again, so one request of 32 bytes
   reads all flags. A barrier; then every thread may read what the ranks had stored.
3. Payload is read by volatile loads, 16 bytes wide, of all ranks at once.
No atomic ever touches host memory: common cards do not carry them over the bus.
"""

import torch
import triton
import triton.language as tl

from dspark.kernels.collective import host_layout
from dspark.kernels.collective.kernel import LAUNCH
from dspark.kernels.common.dispatch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)
SLOTS = tl.constexpr(host_layout.SLOTS)
ROW_OF_FLAGS = tl.constexpr(host_layout.MOST_RANKS)
FLAGS_OF_PHASE = tl.constexpr(host_layout.SLOTS * host_layout.MOST_RANKS)
GROUP = tl.constexpr(host_layout.GROUP)
NAN_TWICE = tl.constexpr(0x7FC07FC0)
# Words of `control`, i64 in device memory.
LIMIT, GAVE_UP = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def release(flag, value):
    """Store `value` i32 in `flag`, behind everything this program has stored."""
    tl.debug_barrier()
    if _INTERPRETED:
        tl.store(flag, value)
    else:
        tl.inline_asm_elementwise(
            """{
                .reg .pred first;
                .reg .u32 thread;
                mov.u32 thread, %tid.x;
                setp.eq.u32 first, thread, 0;
                @first st.release.sys.global.u32 [$1], $2;
                mov.u32 $0, 0;
            }""",
            "=r,l,r,~{memory}",
            [flag.to(tl.int64), value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def wait(flags, value, limit, faults, mark, control, RANKS: tl.constexpr):
    """Return once the flags i32 [RANKS] have reached `value` on the circle; what their owners had
    stored before is visible then.

    limit: ns, 0 = do not wait. Behind it `mark` is stored in the word of `faults` of each rank that
    is missing, and 1 in `control + GAVE_UP`. The interpreter counts looks, not ns.
    """
    if _INTERPRETED:
        rank = tl.arange(0, ROW_OF_FLAGS)
        missing = (tl.load(flags + rank) - value < 0) & (rank < RANKS) & (limit > 0)
        while (tl.sum(missing.to(tl.int32)) > 0) & (limit > 0):
            missing = missing & (tl.load(flags + rank) - value < 0)
            limit -= 1
        tl.store(faults + rank, mark, mask=missing)
        if tl.sum(missing.to(tl.int32)) > 0:
            tl.store(control + GAVE_UP, 1)
    else:
        gave_up = (control + GAVE_UP).to(tl.int64)
        tl.inline_asm_elementwise(
            """{
                .reg .pred done;
                .reg .u32 lane, seen;
                .reg .s32 ahead;
                .reg .u64 place, flag, now, end;
                mov.u32 lane, %tid.x;
                setp.ge.u32 done, lane, $7;
                @done bra OVER;
                setp.eq.u64 done, $3, 0;
                @done bra OVER;
                mul.wide.u32 place, lane, 4;
                add.u64 flag, $1, place;
                mov.u64 end, %globaltimer;
                add.u64 end, end, $3;
            AGAIN:
                mov.u64 now, %globaltimer;
                ld.acquire.sys.global.u32 seen, [flag];
                sub.s32 ahead, seen, $2;
                setp.ge.s32 done, ahead, 0;
                @done bra OVER;
                setp.lt.u64 done, now, end;
                @done bra AGAIN;
                add.u64 place, $4, place;
                st.relaxed.sys.global.u32 [place], $5;
                mov.u64 now, 1;
                st.relaxed.gpu.global.u64 [$6], now;
            OVER:
                mov.u32 $0, 0;
            }""",
            "=r,l,r,l,l,r,l,r,~{memory}",
            [flags.to(tl.int64), value, limit, faults.to(tl.int64), mark, gave_up, RANKS],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@triton.jit
def _low(words):
    """The first bf16 of each word, f32."""
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(words):
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _word(low, high):
    """Two f32 rounded to bf16 -> i32."""
    first = low.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    second = high.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return (first | (second << 16)).to(tl.int32, bitcast=True)


@triton.jit
def _of_all_ranks(words, mask, control, STRIDE: tl.constexpr, RANKS: tl.constexpr):
    """The words of every rank, a tuple; NaN where a wait was given up.

    Volatile, so that nothing comes from a cache of this card. All of them are requested before any
    is used: they cannot cross the barrier, and what is done with them hangs on a load behind it.
    """
    loaded = ()
    for rank in tl.static_range(RANKS):
        word = tl.load(words + rank * STRIDE, mask=mask, other=0, volatile=True)
        loaded = loaded + (word,)  # type: ignore  # noqa: RUF005
    tl.debug_barrier()
    gave_up = tl.load(control + GAVE_UP, volatile=True) != 0
    checked = ()
    for rank in tl.static_range(RANKS):
        checked = checked + (tl.where(gave_up, NAN_TWICE, loaded[rank]),)  # type: ignore  # noqa: RUF005
    return checked


@triton.jit
def _ordered(loaded, RANKS: tl.constexpr):
    """Words of all ranks -> words of their sum, added as `ordered_sum` does."""
    for first in tl.static_range(0, RANKS, 4):
        low, high = _low(loaded[first]), _high(loaded[first])
        for rank in tl.static_range(first + 1, first + 4):
            if rank < RANKS:
                low += _low(loaded[rank])
                high += _high(loaded[rank])
        if first == 0:
            low_sum, high_sum = low, high
        else:
            low_sum += low
            high_sum += high
    return _word(low_sum, high_sum)


@triton.jit
def one_shot(
    partial, out, slot, flag, fault, epochs, control, rank,
    RANKS: tl.constexpr, OWN: tl.constexpr, SLOT: tl.constexpr, ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row in one program: everyone reads the rows of all ranks.

    Args:
        partial, out: i32 [ROW], two bf16 a word.
        slot, flag, fault: i32, as in `host_layout.Views`.
        epochs: i64 [CHANNELS] last epoch of each channel.
        control: i64 [2]: ns to wait at most; whether a wait was given up.
        OWN, SLOT: words from rank to rank, from slot to slot.
    """
    epoch = tl.load(epochs) + 1
    limit = tl.where(tl.load(control + GAVE_UP) == 0, tl.load(control + LIMIT), 0)
    turn = (epoch % SLOTS).to(tl.int32)
    word = tl.arange(0, BLOCK)
    mask = word < ROW
    rows = slot + turn * SLOT + word
    tl.store(rows + rank * OWN, tl.load(partial + word, mask=mask), mask=mask)
    flags = flag + turn * ROW_OF_FLAGS
    low = epoch.to(tl.int32)
    release(flags + rank, low)
    wait(flags, low, limit, fault + rank * ROW_OF_FLAGS, 1, control, RANKS)
    total = _ordered(_of_all_ranks(rows, mask, control, OWN, RANKS), RANKS)
    tl.store(out + word, total, mask=mask)
    tl.store(epochs, epoch)


@triton.jit
def two_shot(
    partial, out, slot, part, flag, fault, epochs, control, rank, rows,
    RANKS: tl.constexpr, OWN: tl.constexpr, SLOT: tl.constexpr, PART: tl.constexpr,
    ROW: tl.constexpr, SLICE: tl.constexpr, BLOCK: tl.constexpr, SLICE_BLOCK: tl.constexpr,
):  # fmt: skip
    """GROUP rows a program: every rank adds its columns, then everyone reads the sums of all.

    partial, out: i32 [rows, ROW]; the rest as in `one_shot`, and
    part: i32, as in `host_layout.Views`; PART: its words from slot to slot.
    """
    first = tl.program_id(0) * GROUP
    channel = 1 + tl.program_id(0)
    epoch = tl.load(epochs + channel) + 1
    limit = tl.where(tl.load(control + GAVE_UP) == 0, tl.load(control + LIMIT), 0)
    turn = (epoch % SLOTS).to(tl.int32)
    low = epoch.to(tl.int32)
    faults = fault + rank * ROW_OF_FLAGS
    published = flag + channel * (2 * FLAGS_OF_PHASE) + turn * ROW_OF_FLAGS
    reduced = published + FLAGS_OF_PHASE

    row = first + tl.arange(0, GROUP)[:, None]
    word = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (word < ROW)
    in_slot = slot + turn * SLOT + (1 + row) * ROW
    values = tl.load(partial + row * ROW + word, mask=mask)
    tl.store(in_slot + rank * OWN + word, values, mask=mask)
    release(published + rank, low)
    wait(published, low, limit, faults, 1 + channel, control, RANKS)

    cut = tl.arange(0, SLICE_BLOCK)[None, :]
    mask = (row < rows) & (cut < SLICE)
    columns = in_slot + rank * SLICE + cut
    total = _ordered(_of_all_ranks(columns, mask, control, OWN, RANKS), RANKS)
    in_part = part + turn * PART + row * SLICE + cut
    tl.store(in_part + rank * OWN, total, mask=mask)
    release(reduced + rank, low)
    wait(reduced, low, limit, faults, 1 + channel, control, RANKS)

    sums = _of_all_ranks(in_part, mask, control, OWN, RANKS)
    for other in tl.static_range(RANKS):
        tl.store(out + row * ROW + other * SLICE + cut, sums[other], mask=mask)
    tl.store(epochs + channel, epoch)


def host_sum(partial, views, epochs, control, rank):
    """Sum of `partial` bf16 [T, columns] over the ranks, 1 <= T <= MOST_ROWS: bf16 [T, columns].

    views: `host_layout.Views`; epochs, control: as in `one_shot`.
    """
    out = torch.empty_like(partial)
    words_in, words_out = partial.view(-1).view(torch.int32), out.view(-1).view(torch.int32)
    ranks, _, _, row = views.slot.shape
    own, slot = views.slot.stride()[:2]
    block = triton.next_power_of_2(row)
    if len(partial) == 1:
        one_shot[(1,)](
            words_in, words_out, views.slot, views.flag, views.fault, epochs, control, rank,
            RANKS=ranks, OWN=own, SLOT=slot, ROW=row, BLOCK=block,
            **LAUNCH["host_one_shot"].keywords,
        )  # fmt: skip
        return out
    cut = views.part.shape[3]
    two_shot[(triton.cdiv(len(partial), host_layout.GROUP),)](
        words_in, words_out, views.slot, views.part, views.flag, views.fault, epochs, control,
        rank, len(partial),
        RANKS=ranks, OWN=own, SLOT=slot, PART=views.part.stride(1), ROW=row, SLICE=cut,
        BLOCK=block, SLICE_BLOCK=triton.next_power_of_2(cut),
        **LAUNCH["host_two_shot"].keywords,
    )  # fmt: skip
    return out
