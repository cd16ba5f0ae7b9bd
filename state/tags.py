"""Who last wrote each ring row: the evidence that debug mode checks reads against.

A tag is (owner's age, position): a slot's generation or a page's epoch, and the position inside
the request or the page. Tags follow the plan of each forward on the host, so keeping them waits
for the device; only STATE_DEBUG=1 pays for that.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.kernels.step import StepMeta
from dspark.state.errors import StateInvariantError
from dspark.state.geometry import StateGeometry
from dspark.state.slots import SlotTable

EMPTY = -1  # nobody wrote since the last clear
DEAD = -2  # of no use to anybody: a rejected draft, or a page waiting for its clear
PAGE_TAIL = 4  # rows at the end of a page that the next page's first window reads


class Stores(NamedTuple):
    """Rows the last forward wrote, by request slot and position."""

    slot: Tensor  # i64 [T]
    pos: Tensor  # i64 [T]
    c4: Tensor  # i64 [T] ring row, -1 = not stored
    c128: Tensor  # i64 [T]


class RowTags:
    """Tags of all C4 rows (shared by "c4" and "idx", which are written together) and C128 rows."""

    def __init__(self, geometry: StateGeometry, slots: SlotTable):
        self._geometry = geometry
        self._slots = slots
        self.epoch = torch.zeros(geometry.window_pages + 1, dtype=torch.int64)  # grows at release
        self.c4 = torch.full((geometry.rows("c4"), 2), EMPTY)
        self.c128 = torch.full((geometry.rows("c128"), 2), EMPTY)
        self._last: Stores | None = None

    @property
    def observing(self) -> bool:
        """False until a forward's plan has been seen; tags then say nothing about the rows."""
        return self._last is not None

    def released(self, pages: Tensor) -> None:
        """Until they are cleared, anything may be in these pages, e.g. half of a failed load."""
        pages = pages.cpu().long()
        pages = pages[pages > 0]
        self.epoch[pages] += 1
        tags = self._by_page()[pages]
        tags[tags[..., 0] == EMPTY] = DEAD
        self._by_page()[pages] = tags

    def cleared_pages(self, pages: Tensor) -> None:
        pages = pages.cpu().long()
        self._by_page()[pages[pages > 0]] = EMPTY

    def cleared_slots(self, slots: list[int]) -> None:
        self.c128.view(-1, self._geometry.c128.ring, 2)[slots] = EMPTY

    def cleared_all(self) -> None:
        self.c4.fill_(EMPTY)
        self.c128.fill_(EMPTY)

    def loaded(self, pages: Tensor) -> None:
        """Complete pages were copied in from elsewhere: their last rows count as written."""
        pages = pages.cpu().long()
        tags = self._by_page()
        tags[pages] = DEAD
        tags[pages, -PAGE_TAIL:, 0] = self.epoch[pages, None]
        page = self._geometry.page
        tags[pages, -PAGE_TAIL:, 1] = torch.arange(page - PAGE_TAIL, page)

    def rolled_back(self, slot: Tensor, committed: Tensor, commit_len: Tensor) -> None:
        """The last forward's rows at or above committed + commit_len of each slot are dead."""
        if self._last is None:
            return
        last = self._last
        for s, frontier in zip(slot.tolist(), (committed + commit_len).tolist(), strict=True):
            dead = (last.slot == s) & (last.pos >= frontier)
            self.c4[last.c4[dead & (last.c4 >= 0)]] = DEAD
            self.c128[last.c128[dead & (last.c128 >= 0)]] = EMPTY  # the kernel empties these

    def observe(self, meta: StepMeta, request_slot: Tensor) -> None:
        """Check every row the planned forward will read, then tag every row it will write.

        Raises StateInvariantError naming kind, slot or page, generation or epoch and position.
        """
        plan = meta._replace(**{k: v.cpu().long() for k, v in meta._asdict().items()})
        slot = request_slot.cpu().long()[plan.row_req.clamp(min=0)]
        slot = torch.where(plan.row_req < 0, 0, slot)
        self._check_c4_reads(plan)
        self._check_c128_reads(plan, slot)
        self._tag_stores(plan, slot)

    def _check_c128_reads(self, plan: StepMeta, slot: Tensor) -> None:
        """All rows of the open block below the forward's first row must be there."""
        first = (plan.row_in_req == 0) & (plan.row_req >= 0)
        for s, frontier in zip(slot[first].tolist(), plan.pos[first].tolist(), strict=True):
            ring = self._geometry.c128.ring
            pos = torch.arange(frontier // 128 * 128, frontier)
            tags = self.c128[s * ring + pos % ring]
            generation = int(self._slots.generation[s])
            wrong = (tags[:, 0] != generation) | (tags[:, 1] != pos)
            for p, tag in zip(pos[wrong].tolist(), tags[wrong].tolist(), strict=True):
                raise StateInvariantError(
                    f"c128 row of slot {s} generation {generation} position {p} is needed, "
                    f"but the row holds {describe(tag, 'generation')}"
                )

    def _check_c4_reads(self, plan: StepMeta) -> None:
        """Of each closing window, the rows that do not come from the batch must be there."""
        page, ring = self._geometry.page, self._geometry.c4.ring
        closing = ((plan.pos + 1) % 4 == 0) & (plan.row_req >= 0)
        pos, in_req = plan.pos[closing, None], plan.row_in_req[closing, None]
        distance = torch.arange(7, -1, -1)
        older, newer = plan.c4_plan[closing, 1:2], plan.c4_plan[closing, 2:3]
        row = torch.cat([older + torch.arange(4), newer + torch.arange(4)], 1)
        read = (distance > in_req) & (pos - distance >= 0)
        row, want = row[read], (pos - distance)[read] % page
        tags, epoch = self.c4[row], self.epoch[row // ring]
        wrong = (tags[:, 0] != epoch) | (tags[:, 1] != want)
        for r, w, e, tag in zip(
            *(t[wrong].tolist() for t in (row, want, epoch, tags)), strict=True
        ):
            raise StateInvariantError(
                f"c4 row {r % ring} of page {r // ring} epoch {e} is needed for page offset {w}, "
                f"but the row holds {describe(tag, 'epoch')}"
            )

    def _tag_stores(self, plan: StepMeta, slot: Tensor) -> None:
        page, ring = self._geometry.page, self._geometry.c4.ring
        c4, c128 = plan.c4_store, plan.c128_store
        rows = c4[c4 >= 0]
        self.c4[rows, 0] = self.epoch[rows // ring]
        self.c4[rows, 1] = plan.pos[c4 >= 0] % page
        rows = c128[c128 >= 0]
        self.c128[rows, 0] = self._slots.generation[slot[c128 >= 0]]
        self.c128[rows, 1] = plan.pos[c128 >= 0]
        self._last = Stores(slot, plan.pos, c4, c128)

    def _by_page(self) -> Tensor:
        return self.c4.view(-1, self._geometry.c4.ring, 2)


def describe(tag: list[int], age: str) -> str:
    if tag[0] == EMPTY:
        return "nothing"
    if tag[0] == DEAD:
        return "a rejected draft or a released page"
    return f"{age} {tag[0]} position {tag[1]}"
