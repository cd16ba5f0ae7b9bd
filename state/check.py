"""All invariants that can be seen from the pools and the tables between two forwards."""

import torch
from torch import Tensor

from dspark.state.errors import StateInvariantError
from dspark.state.geometry import KINDS
from dspark.state.pools import StatePools
from dspark.state.slots import SlotTable
from dspark.state.tags import EMPTY, RowTags


def check_padding(pools: StatePools) -> None:
    """Slot 0 and page 0 belong to nobody and stay empty for ever."""
    for kind in KINDS:
        rows = pools.tensors[kind][:, : pools.geometry.ring(kind).ring]
        for layer, row in (~empty_rows(rows)).nonzero().tolist():
            raise StateInvariantError(
                f"{place(pools, kind, layer, row)} is padding, which nobody may write, "
                f"but is not empty"
            )


def check_rows_whole(pools: StatePools, slots: SlotTable) -> None:
    """A row is empty or finite in every column; anything else was torn or never initialised."""
    for kind in KINDS:
        rows = pools.tensors[kind]
        torn = ~(torch.isfinite(rows).all(-1) | empty_rows(rows))
        for layer, row in torn.nonzero().tolist():
            raise StateInvariantError(
                f"{place(pools, kind, layer, row, slots)} is neither empty nor finite"
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


def check_free_pages(pools: StatePools, free: Tensor, pending: Tensor) -> None:
    """A free page is in the list once, and empty unless its clear is still to come.

    free, pending: i64 [n] page ids.
    """
    pages = pools.geometry.swa_pages
    count = torch.bincount(free.clamp(0, pages + 1), minlength=pages + 2)
    if count[0] or count[pages + 1]:
        raise StateInvariantError(f"the free list holds a page that is not one of 1..{pages}")
    for page in (count > 1).nonzero().flatten().tolist():
        raise StateInvariantError(f"page {page} is {count[page]} times in the free list")
    count[pending.clamp(0, pages)] = 0
    clean = count[: pages + 1] > 0
    for kind in ("c4", "idx"):
        ring = pools.geometry.ring(kind).ring
        rows = clean.repeat_interleave(ring).nonzero().flatten().to(pools.tensors[kind].device)
        dirty = ~empty_rows(pools.tensors[kind][:, rows])
        for layer, i in dirty.nonzero().tolist():
            raise StateInvariantError(
                f"{place(pools, kind, layer, int(rows[i]))} belongs to a free page, "
                f"but is not empty"
            )


def check_tags(pools: StatePools, slots: SlotTable, tags: RowTags) -> None:
    """In every layer, rows of current owners hold something and rows nobody wrote hold nothing."""
    ring = pools.geometry.c4.ring
    page_age = tags.epoch.repeat_interleave(ring)
    slot_age = slots.generation.repeat_interleave(pools.geometry.c128.ring)
    for kind in KINDS:
        tag, age = (tags.c128, slot_age) if kind == "c128" else (tags.c4, page_age)
        empty = empty_rows(pools.tensors[kind]).cpu()
        written = tag[:, 0] == age
        untouched = tag[:, 0] == EMPTY
        for layer, row in (empty & written).nonzero().tolist():
            raise StateInvariantError(
                f"{place(pools, kind, layer, row, slots)} was stored at position "
                f"{int(tag[row, 1])} but is empty"
            )
        for layer, row in (~empty & untouched).nonzero().tolist():
            raise StateInvariantError(
                f"{place(pools, kind, layer, row, slots)} was written by nobody but is not empty"
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
