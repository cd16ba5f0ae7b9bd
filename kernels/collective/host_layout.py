"""What the ranks' shared memory holds, where they sum through the memory of the host.

A *channel* is a conversation of its own: its rows, its flags and its count of epochs belong to
nobody else, so programs of one launch never wait for each other. Channel 0 carries a single row.
Each of the others carries a group of rows of a larger sum, always the same ones.

Every sum is an *epoch* of its channels. An epoch has one of three slots, by turns. Two would do:
who publishes epoch e has seen all ranks in e - 1, so nobody reads e - 2 any more. The third lets a
rank publish before it has finished the epoch before.

    fault     i32 [8, 8]              by who waited and who was missing: 0, or 1 + channel
    serving   i32 [1]                 1 once the ranks have tried the sums and agreed to use them
    flag      i32 [channel, 2, 3, 8]  by phase, slot and rank: the epoch a rank has arrived in
    of each rank, on pages of its own:
      slot    bf16 [3, 65, columns]         its partial sums
      part    bf16 [3, 64, columns / ranks] its columns of the whole sum
"""

from typing import NamedTuple

import torch
from torch import Tensor

MOST_RANKS = 8  # their flags lie side by side: 32 bytes, one read
MOST_ROWS = 64
GROUP = 4  # rows of a channel
CHANNELS = 1 + MOST_ROWS // GROUP
SLOTS = 3
PAGE = 4096
WORD = 4  # bytes
PUBLISHED, REDUCED = range(2)  # the phases: partial sums are there; columns of the sum are there
FAULT_WORDS = MOST_RANKS * MOST_RANKS
HEAD_WORDS = FAULT_WORDS + MOST_RANKS  # flags begin at a multiple of 32 bytes
FLAG_WORDS = CHANNELS * 2 * SLOTS * MOST_RANKS
_CIRCLE = 1 << 32


class Layout(NamedTuple):
    """Words are of 32 bits, two bf16 each."""

    ranks: int
    columns: int  # of a row

    @property
    def row_words(self) -> int:
        return self.columns // 2

    @property
    def slice_words(self) -> int:
        """Of one rank's columns of a row."""
        return self.row_words // self.ranks

    @property
    def slot_words(self) -> int:
        """From a slot to the next."""
        return (1 + MOST_ROWS) * self.row_words

    @property
    def part_words(self) -> int:
        return MOST_ROWS * self.slice_words

    @property
    def common_bytes(self) -> int:
        """Faults and flags."""
        return _pages((HEAD_WORDS + FLAG_WORDS) * WORD)

    @property
    def own_bytes(self) -> int:
        """Of one rank."""
        return _pages(SLOTS * (self.slot_words + self.part_words) * WORD)

    @property
    def nbytes(self) -> int:
        return self.common_bytes + self.ranks * self.own_bytes

    def own_start(self, rank: int) -> int:
        """Byte at which the pages of a rank begin."""
        return self.common_bytes + rank * self.own_bytes


class Views(NamedTuple):
    """The memory by what it holds; all i32, two bf16 a word."""

    fault: Tensor  # [8, 8] by who waited and who was missing
    serving: Tensor  # [1]
    flag: Tensor  # [CHANNELS, 2, SLOTS, 8] by phase, slot and rank
    slot: Tensor  # [ranks, SLOTS, 1 + MOST_ROWS, row words]
    part: Tensor  # [ranks, SLOTS, MOST_ROWS, slice words]


def fits(ranks: int, columns: int) -> bool:
    """Whether rows of `columns` can be summed: each rank's columns must be read in 16 bytes."""
    return 2 <= ranks <= MOST_RANKS and columns > 0 and columns % (8 * ranks) == 0


def views(memory: Tensor, layout: Layout) -> Views:
    """memory: u8 [layout.nbytes], page-aligned."""
    words = memory.view(torch.int32)
    own = layout.own_bytes // WORD
    slot = layout.common_bytes // WORD
    part = slot + SLOTS * layout.slot_words
    row, cut = layout.row_words, layout.slice_words
    return Views(
        words[:FAULT_WORDS].view(MOST_RANKS, MOST_RANKS),
        words[FAULT_WORDS:][:1],
        words[HEAD_WORDS:][:FLAG_WORDS].view(CHANNELS, 2, SLOTS, MOST_RANKS),
        words.as_strided(
            (layout.ranks, SLOTS, 1 + MOST_ROWS, row), (own, layout.slot_words, row, 1), slot
        ),
        words.as_strided(
            (layout.ranks, SLOTS, MOST_ROWS, cut), (own, layout.part_words, cut, 1), part
        ),
    )


def slot_of(epoch: int) -> int:
    """Epochs are counted in 64 bits. Of their low 32, 2^32 - 1 and the 0 after it are both
    multiples of three, and two epochs in a row would share a slot."""
    return epoch % SLOTS


def flag_of(epoch: int) -> int:
    """Low 32 bits of an epoch, as a flag holds them: signed."""
    return (epoch + _CIRCLE // 2) % _CIRCLE - _CIRCLE // 2


def has_arrived(flag: int, epoch: int) -> bool:
    """Whether a rank with this flag is in `epoch` or behind it, on a circle of 2^32."""
    return flag_of(flag - epoch) >= 0


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
