"""All invariants that can be seen from the pools and the tables between two forwards.

`check_slots` and `check_free_list` look at the host's tables only. The others read every ring,
which is for debugging; they do so in bands of rows, so that their workspace does not grow with a
pool.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.state.errors import StateInvariantError
from dspark.state.geometry import KINDS
from dspark.state.pools import StatePools
from dspark.state.slots import SlotTable
from dspark.state.tags import EMPTY, RowTags

BAND_BYTES = 4 << 20  # of a ring read at once; what is computed from it takes as much again


class Band(NamedTuple):
    """Neighbouring rows of one layer."""

    kind: str
    layer: int
    first: int  # number of the first row
    rows: Tensor  # f32 [n, width], a view of the pool

    def numbers(self, chosen: Tensor) -> list[int]:
        """Row numbers in the layer where bool [n] `chosen` holds."""
        return [self.first + row for row in chosen.nonzero().flatten().tolist()]

    def part(self, of_all_rows: Tensor) -> Tensor:
        """[n, ...] the part of host tensor [rows, ...] that describes this band."""
        return of_all_rows[self.first : self.first + len(self.rows)]


def bands(pools: StatePools, kinds: tuple[str, ...] = KINDS) -> Iterator[Band]:
    """Every row of every layer, at most BAND_BYTES at once."""
    for kind in kinds:
        step = max(1, BAND_BYTES // (4 * pools.geometry.ring(kind).width))
        for layer, rows in enumerate(pools.tensors[kind]):
            for first in range(0, len(rows), step):
                yield Band(kind, layer, first, rows[first : first + step])


def check_padding(pools: StatePools) -> None:
    """Slot 0 and page 0 belong to nobody and stay empty for ever."""
    for kind in KINDS:
        for layer, rows in enumerate(pools.tensors[kind]):
            padding = rows[: pools.geometry.ring(kind).ring]
            for row in (~empty_rows(padding)).nonzero().flatten().tolist():
                raise StateInvariantError(
                    f"{place(pools, kind, layer, row)} is padding, which nobody may write, "
                    f"but is not empty"
                )


def check_rows_whole(pools: StatePools, slots: SlotTable) -> None:
    """A row is empty or finite in every column; anything else was torn or never initialised."""
    for band in bands(pools):
        torn = ~(torch.isfinite(band.rows).all(-1) | empty_rows(band.rows))
        for row in band.numbers(torn):
            raise StateInvariantError(
                f"{place(pools, band.kind, band.layer, row, slots)} is neither empty nor finite"
            )


def check_slots(slots: SlotTable, seen: Tensor, free: list[int] | None) -> None:
    """Generations never shrink; free and held slots are disjoint and together are all of them.

    seen: i64 [slots + 1] generations of the previous check. free: SGLang's free list, if attached.
    """
    shrunk = (slots.generation < seen).nonzero().flatten().tolist()
    for slot in shrunk:
        raise StateInvariantError(
            f"slot {slot} went back from generation {seen[slot]} to {slots.generation[slot]}"
        )
    if slots.generation[0] != 0:
        raise StateInvariantError(f"slot 0 is padding but has generation {slots.generation[0]}")
    if free is None:
        return
    expected = sorted(set(range(1, len(slots.generation))) - slots.held)
    if sorted(free) != expected:
        wrong = sorted(set(free) ^ set(expected)) or sorted(s for s in free if free.count(s) > 1)
        raise StateInvariantError(
            f"slot {wrong[0]} generation {slots.generation[wrong[0]]} is "
            f"{'held' if wrong[0] in slots.held else 'not held'} and "
            f"{free.count(wrong[0])} times in the free list"
        )


def check_free_list(pages: int, free: Tensor) -> None:
    """A free page is one of 1..`pages` and in the list once. free: i64 [n] page ids, on the host.

    Sorts the list instead of counting pages, so it needs no more room than the list.
    """
    ordered = free.sort().values
    if len(ordered) and not 1 <= int(ordered[0]) <= int(ordered[-1]) <= pages:
        raise StateInvariantError(f"the free list holds a page that is not one of 1..{pages}")
    for page in ordered[1:][ordered[1:] == ordered[:-1]].tolist():
        raise StateInvariantError(
            f"page {page} is {int((free == page).sum())} times in the free list"
        )


def check_free_pages_empty(pools: StatePools, free: Tensor, pending: Tensor) -> None:
    """The rows of a free page are empty unless its clear is still to come.

    free, pending: i64 [n] page ids, on the host.
    """
    clean = torch.zeros(pools.geometry.window_pages + 1, dtype=torch.bool)
    clean[free] = True
    clean[pending.clamp(0, pools.geometry.window_pages)] = False
    row_clean = clean.repeat_interleave(pools.geometry.c4.ring)
    for band in bands(pools, ("c4", "idx")):
        dirty = ~empty_rows(band.rows).cpu() & band.part(row_clean)
        for row in band.numbers(dirty):
            raise StateInvariantError(
                f"{place(pools, band.kind, band.layer, row)} belongs to a free page, "
                f"but is not empty"
            )


def check_tags(pools: StatePools, slots: SlotTable, tags: RowTags) -> None:
    """In every layer, rows of current owners hold something and rows nobody wrote hold nothing."""
    page_age = tags.epoch.repeat_interleave(pools.geometry.c4.ring)
    slot_age = slots.generation.repeat_interleave(pools.geometry.c128.ring)
    for band in bands(pools):
        of_slots = band.kind == "c128"
        tag = band.part(tags.c128 if of_slots else tags.c4)
        empty = empty_rows(band.rows).cpu()
        written = tag[:, 0] == band.part(slot_age if of_slots else page_age)
        untouched = tag[:, 0] == EMPTY
        for row in band.numbers(empty & written):
            raise StateInvariantError(
                f"{place(pools, band.kind, band.layer, row, slots)} was stored at position "
                f"{int(tag[row - band.first, 1])} but is empty"
            )
        for row in band.numbers(~empty & untouched):
            raise StateInvariantError(
                f"{place(pools, band.kind, band.layer, row, slots)} was written by nobody "
                f"but is not empty"
            )


def empty_rows(rows: Tensor) -> Tensor:
    """bool [...]: which rows [..., width] are empty."""
    half = rows.shape[-1] // 2
    return (rows[..., :half] == 0).all(-1) & (rows[..., half:] == -torch.inf).all(-1)


def place(
    pools: StatePools, kind: str, layer: int, row: int, slots: SlotTable | None = None
) -> str:
    """Where a row is, in words: kind, layer, owner (with its generation) and row in the ring."""
    ring = pools.geometry.ring(kind).ring
    owner, offset = divmod(row, ring)
    name = f"page {owner}"
    if kind == "c128":
        name = f"slot {owner}" + (f" generation {slots.generation[owner]}" if slots else "")
    return f"{kind} layer {layer} {name} row {offset}"
