"""Deliberate mutations. The unmutated server uses `Faults()`; every subclass breaks one rule."""

import torch

from dspark.kernels.step import StepMeta
from dspark.state import StateGeometry


class Faults:
    """Hooks at the places where real servers went wrong; all of them do the right thing here."""

    early_clears = False  # clear on the scheduling stream at the release
    rollback_late = False  # roll back after the next step began
    load_unordered = False  # the load stream waits for nothing
    load_before_flush = False  # pending clears run after the load
    load_without_rows = False  # a page comes back without its C4 rows
    publish_allocated = False  # pages enter the tree by allocated, not committed, length
    eager_window = False  # the window is evicted up to the last token's page
    keep_generation = False  # an assignment does not count a generation
    forget_flush = False  # flush does not clear
    restart_generations = False  # flush starts generations at 0 again, as 0.5.17 does
    unhooked_release = False  # window eviction releases pages behind the clearer's back
    wrong_page = False  # a duplicate's release frees the page the tree keeps
    leak_on_failed_load = False  # a failed load keeps its pages
    slot_clear_late = False  # the slot is cleared one forward too late

    def plan(self, meta: StepMeta, geometry: StateGeometry, starts, rows) -> StepMeta:
        return meta

    def commit(self, commit: int) -> int:
        return commit


def stored(meta: StepMeta, c4: torch.Tensor, c128: torch.Tensor) -> StepMeta:
    """`meta` that stores only where c4 and c128 (bool [T]) say so."""
    return meta._replace(
        c4_store=torch.where(c4, meta.c4_store, -1),
        c128_store=torch.where(c128, meta.c128_store, -1),
    )


class UpstreamStoreRule(Faults):
    """0.5.17 stores from min(last closed window, end - min(ring - ratio, 4)) on, by the
    optimistic end: complete up to four rows a verify, incomplete above."""

    def plan(self, meta, geometry, starts, rows):
        end = torch.tensor([s + r.length for s, r in zip(starts, rows, strict=True)] + [0])
        end = end[meta.row_req.long()]

        def keep(ratio: int, overlap: int, ring: int):
            closed = end // ratio * ratio - overlap
            return meta.pos >= torch.minimum(closed, end - min(ring - ratio, 4))

        c4 = keep(4, 4, geometry.c4.ring) | (meta.pos % 256 >= 252)
        return stored(meta, c4, keep(128, 0, geometry.c128.ring))


class NoPageTail(Faults):
    """A prefill keeps the open block only, not the last four rows of every page."""

    def plan(self, meta, geometry, starts, rows):
        end = torch.tensor([s + r.length for s, r in zip(starts, rows, strict=True)] + [0])
        open_block = meta.pos >= end[meta.row_req.long()] // 4 * 4 - 4
        return stored(meta, open_block, torch.ones_like(open_block))


class OffByOneRing(Faults):
    """Stores use one ring row fewer than reads."""

    def plan(self, meta, geometry, starts, rows):
        base, ring = meta.c128_plan[:, 1], geometry.c128.ring
        row = base + meta.pos % (ring - 1)
        return meta._replace(c128_store=torch.where(meta.c128_store >= 0, row, -1).to(torch.int32))


class OptimisticLength(Faults):
    """Every row sees the entries of the whole verify."""

    def plan(self, meta, geometry, starts, rows):
        end = torch.tensor([s + r.length for s, r in zip(starts, rows, strict=True)] + [0])
        return meta._replace(c4_len=(end[meta.row_req.long()] // 4).to(torch.int32))


class PaddingIntoZero(Faults):
    """Padded rows store into row 0."""

    def plan(self, meta, geometry, starts, rows):
        padded = meta.row_req < 0
        return meta._replace(
            c4_store=torch.where(padded, 0, meta.c4_store),
            c128_store=torch.where(padded, 0, meta.c128_store),
        )


class StoreOnlyAccepted(Faults):
    """The last row of a forward is not stored."""

    def plan(self, meta, geometry, starts, rows):
        end = torch.tensor([s + r.length for s, r in zip(starts, rows, strict=True)] + [0])
        inner = meta.pos + 1 < end[meta.row_req.long()]
        return stored(meta, inner, inner)


class RollbackByDrafts(Faults):
    """The rollback is told the accepted drafts instead of the commit."""

    def commit(self, commit):
        return commit - 1


class EarlyClears(Faults):
    early_clears = True


class RollbackLate(Faults):
    rollback_late = True


class LoadUnordered(Faults):
    load_unordered = True


class LoadBeforeFlush(Faults):
    load_before_flush = True


class LoadWithoutRows(Faults):
    load_without_rows = True


class PublishAllocated(Faults):
    publish_allocated = True


class EagerWindow(Faults):
    eager_window = True


class KeepGeneration(Faults):
    keep_generation = True


class ForgetFlush(Faults):
    forget_flush = True


class WrongPage(Faults):
    wrong_page = True


class LeakOnFailedLoad(Faults):
    leak_on_failed_load = True


class SlotClearLate(Faults):
    slot_clear_late = True


class RestartGenerations(Faults):
    restart_generations = True


class UnhookedRelease(Faults):
    unhooked_release = True
