"""The accelerator: rings, entries and the forwards that read and write them.

Everything here executes when the stream gets to it, possibly long after the host moved on, so a
forward sees the tables as they were at its launch and the lengths as they are on the device.
"""

from collections.abc import Sequence as Ids
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dspark.kernels.step import BatchRows, Bounds, Rings, StepMeta, Tables, step_meta
from dspark.state import RingSpec, StateGeometry, StateLifecycle
from dspark.state.check import empty_rows

from .checks import Checks
from .faults import Faults
from .oracle import Sequence, c4_entries, c128_entries, salted

PAGE = 256
LAYERS = 2
MAX_PAGES = 4
SALT = {"c4": 0, "idx": LAYERS, "c128": 2 * LAYERS}  # layer salts differ between kinds


class Row(NamedTuple):
    """One request of a launched forward."""

    slot: int
    generation: int
    sequence: Sequence
    length: int  # rows it runs
    accept: int  # rows to commit; all of them in a prefill
    start: int | None  # first position; None = the device's own length
    fresh: bool  # first forward of this slot's owner


class Launch(NamedTuple):
    rows: list[Row]
    store_all: bool
    padding: int  # padded requests and rows added on top
    token_table: Tensor  # tables as they were when launched
    window_table: Tensor
    epoch: dict[int, int]  # window page -> owner's epoch
    published: frozenset[int]  # window pages of the prefix tree
    first_use: frozenset[int]  # window pages allocated, not loaded, since the last launch


class Device:
    """State under test plus entry pools; `full_pages` and the geometry count usable ones."""

    def __init__(self, state: StateLifecycle, full_pages: int, checks: Checks, faults: Faults):
        self.state, self.geometry = state, state.geometry
        self.checks, self.faults = checks, faults
        self.full_pages = full_pages
        self.seq_len = [0] * (self.geometry.slots + 1)
        self.entries = {
            "c4": torch.full((LAYERS, (full_pages + 1) * 64, 8), torch.nan),
            "idx": torch.full((LAYERS, (full_pages + 1) * 64, 8), torch.nan),
            "c128": torch.full((LAYERS, (full_pages + 1) * 2, 128), torch.nan),
        }
        self.expect_empty = True  # clears are on and the pools began empty
        self.page_written: dict[int, int] = {}  # page -> epoch of its last writer since a clear
        self.slot_written: dict[int, int] = {}
        self.padding_before = self._padding_rows()

    # -- clears, as the stream executes them ---------------------------------------------------

    def note_cleared_pages(self, pages: Ids[int], epoch: dict[int, int]) -> None:
        """epoch: owners when the clear was launched."""
        for page in pages:
            owner = self.page_written.pop(page, None)
            self.checks.require(
                "order",
                owner is None or owner != epoch.get(page),
                f"page {page} is cleared after its owner of epoch {owner} wrote",
            )

    def note_cleared_slots(self, slots: Ids[int], generation: list[int]) -> None:
        for slot in slots:
            owner = self.slot_written.pop(slot, None)
            self.checks.require(
                "order",
                owner is None or owner != generation[slot],
                f"slot {slot} is cleared after its owner of generation {owner} wrote",
            )

    # -- forward -----------------------------------------------------------------------------

    def forward(self, launch: Launch) -> list[int]:
        """Plan, form entries, store rows, check all that became readable; returns the commits."""
        rows = launch.rows
        starts = [self.seq_len[r.slot] if r.start is None else r.start for r in rows]
        commits = [min(r.accept, r.length) for r in rows]
        values = [
            row.sequence.drafted(start, commit, row.length)
            for row, start, commit in zip(rows, starts, commits, strict=True)
        ]
        if self.expect_empty:
            self._check_first_use(launch)
        meta = self.faults.plan(self._plan(launch, starts), self.geometry, starts, rows)
        if self.state.tags is not None:
            slots = torch.tensor([r.slot for r in rows] + [-1] * launch.padding)
            self.state.observe(meta, slots)
        self._check_stores(launch, meta, starts)
        batch = np.concatenate([v[s:] for v, s in zip(values, starts, strict=True)])
        self._compress(meta, torch.from_numpy(np.append(batch, [0.0] * launch.padding)))
        self._note_writes(launch, meta)
        for i, row in enumerate(rows):
            self._check_visible(meta, i, values[i], starts[i], commits[i], row)
            self.seq_len[row.slot] = starts[i] + commits[i]
            if not launch.store_all:
                self._check_live_rows(launch, row)
        self.check_padding()
        return commits

    def rollback(self, launch: Launch, commits: list[int]) -> None:
        """The epilogue of a verify."""
        starts = [
            self.seq_len[r.slot] - commit for r, commit in zip(launch.rows, commits, strict=True)
        ]
        pools = self.state.pools.tensors
        before = {kind: rows.clone() for kind, rows in pools.items()}
        pad = [-1] * launch.padding
        self.state.rollback.after_verify(
            torch.tensor([r.slot for r in launch.rows] + pad),
            torch.tensor(starts + pad),
            torch.tensor([self.faults.commit(c) for c in commits] + pad),
            torch.tensor([r.length for r in launch.rows] + pad),
        )
        ring = self.geometry.c128.ring
        allowed = {
            row.slot * ring + (start + offset) % ring
            for row, start, commit in zip(launch.rows, starts, commits, strict=True)
            for offset in range(commit, row.length)
        }
        changed = differing(pools["c128"], before["c128"])
        self.checks.require(
            "rollback_locality",
            changed <= allowed,
            f"rollback changed c128 rows {sorted(changed - allowed)}",
        )
        for kind in ("c4", "idx"):
            untouched = not differing(pools[kind], before[kind])
            self.checks.require("rollback_locality", untouched, f"rollback changed {kind} rows")
        for row in launch.rows:
            self._check_live_rows(launch, row)

    def _plan(self, launch: Launch, starts: list[int]) -> StepMeta:
        pad = launch.padding
        lengths = [r.length for r in launch.rows]
        return step_meta(
            BatchRows(
                torch.tensor([r.slot for r in launch.rows] + [-1] * pad),
                torch.tensor(starts + [0] * pad),
                torch.tensor(lengths + [0] * pad),
                sum(lengths) + pad,
            ),
            Tables(launch.token_table, launch.window_table),
            Bounds(128, MAX_PAGES, MAX_PAGES * 2),
            Rings(self.geometry.c4.ring, self.geometry.c128.ring),
            store_all=launch.store_all,
        )

    def _compress(self, meta: StepMeta, batch: Tensor) -> None:
        """Entries first, then rows. batch: f32 [T] values; rows of a request are consecutive."""
        pools = self.state.pools.tensors
        four = torch.arange(4)
        c4_rows = torch.cat(
            [masked_run(meta.c4_plan[:, 1], four), masked_run(meta.c4_plan[:, 2], four)], 1
        )
        base, ring = meta.c128_plan[:, 1:2], self.geometry.c128.ring
        c128_pos = meta.pos[:, None] - torch.arange(127, -1, -1)
        c128_rows = torch.where((c128_pos >= 0) & (base >= 0), base + c128_pos % ring, -1)
        sign = torch.tensor([-1.0] * 4 + [1.0] * 4)
        for kind, rows, entry_slot, signs in (
            ("c4", c4_rows, meta.c4_entry, sign),
            ("idx", c4_rows, meta.c4_entry, sign),
            ("c128", c128_rows, meta.c128_entry, torch.ones(128)),
        ):
            closing = (entry_slot >= 0).nonzero().flatten()
            if len(closing):
                in_req = meta.row_in_req[closing]
                entry = self._form(kind, batch, closing, rows[closing], in_req, signs)
                self.entries[kind][:, entry_slot[closing].long()] = entry
        for kind, store in (
            ("c4", meta.c4_store),
            ("idx", meta.c4_store),
            ("c128", meta.c128_store),
        ):
            stored = (store >= 0).nonzero().flatten()
            salt = torch.arange(LAYERS)[:, None] + SALT[kind]
            kv = batch[stored].float() + salt * (1 << 21)  # [layers, n]
            halves = [kv] if kind == "c128" else [-kv, kv]
            row = torch.stack(halves + [torch.zeros_like(kv)] * len(halves), -1)
            pools[kind][:, store[stored].long()] = row

    def _form(self, kind, batch, closing, rows, in_req, signs) -> Tensor:
        """[layers, n, terms] of the entries that close at batch rows `closing`."""
        terms = rows.shape[1]
        distance = torch.arange(terms - 1, -1, -1)
        own = batch[(closing[:, None] - distance).clamp(min=0)].float()  # [n, terms]
        salt = (torch.arange(LAYERS) + SALT[kind])[:, None, None] * (1 << 21)
        pool = self.state.pools.tensors[kind]
        half = pool.shape[2] // 2
        ring = pool[:, rows.clamp(min=0).long()]  # [layers, n, terms, width]
        column = torch.arange(terms) * half // terms  # C4: A half for the older group, then B
        kv = ring.gather(3, column.expand(ring.shape[:3])[..., None])[..., 0]
        score = ring.gather(3, (column + half).expand(ring.shape[:3])[..., None])[..., 0]
        weighted = torch.where(score == -torch.inf, kv * 0, kv)  # weight 0 does not hide a NaN
        stored = torch.where(rows >= 0, weighted, 0)
        return torch.where(distance <= in_req[:, None], (own + salt) * signs, stored)

    # -- checks ------------------------------------------------------------------------------

    def _check_visible(self, meta, i, values, start, commit, row: Row) -> None:
        """Every entry the request's rows can see, and how many each of them sees."""
        mine = meta.row_req == i
        end = start + row.length
        visible = np.arange(start, end) + 1
        for length, ratio in ((meta.c4_len, 4), (meta.c128_len, 128)):
            seen = length[mine].numpy()
            right = bool((seen == visible // ratio).all())
            message = "" if right else f"rows {start}..{end} see {seen} entries"
            self.checks.require("draft_consistency", right, message)
        for kind, make, ratio in (
            ("c4", c4_entries, 4),
            ("idx", c4_entries, 4),
            ("c128", c128_entries, 128),
        ):
            entry_slot = self._entry_slots(meta, i, end // ratio, 256 // ratio)
            got = self.entries[kind][:, entry_slot].numpy()
            terms = make(values)
            for layer in range(LAYERS):
                want = salted(terms, layer + SALT[kind])
                wrong = (got[layer] != want).any(1).nonzero()[0]
                committed = (start + commit) // ratio
                prop = (
                    "spec_equivalence"
                    if len(wrong) and wrong[0] < committed
                    else "draft_consistency"
                )
                where = f"{kind} layer {layer} slot {row.slot} rows {start}+{row.length}"
                self.checks.require(
                    prop, not len(wrong), f"{where}: wrong entries {wrong[:5].tolist()}"
                )
                self.checks.made["spec_equivalence"] += committed
                foreign = np.isnan(got[layer]).any()
                self.checks.require(
                    "write_before_read", not foreign, f"{where}: an unwritten row was read"
                )
        if not self.expect_empty:
            self.checks.made["clearing_is_redundant"] += 1

    def _entry_slots(self, meta: StepMeta, i: int, count: int, per_page: int) -> Tensor:
        entry = torch.arange(count)
        return meta.page_table[i, entry // per_page].long() * per_page + entry % per_page

    def _check_live_rows(self, launch: Launch, row: Row) -> None:
        """Committed rows that a later window reads are still there, bit for bit."""
        end = self.seq_len[row.slot]
        values = np.array(row.sequence.upto(end).values[:end], dtype=np.float32)
        open_c4, open_c128 = max(end // 4 * 4 - 4, 0), end // 128 * 128
        pos = torch.arange(open_c128, end)
        ring = self.state.geometry.c128.ring
        rows = row.slot * ring + pos % ring
        self._require_rows("c128", rows, values[open_c128:], row)
        pos = torch.arange(open_c4, end)
        full = launch.token_table[row.slot, pos].long()
        window_slot, ring = launch.window_table[full], self.state.geometry.c4.ring
        rows = window_slot // PAGE * ring + window_slot % ring
        self._require_rows("c4", rows, values[open_c4:], row)
        self._require_rows("idx", rows, values[open_c4:], row)

    def _require_rows(self, kind: str, rows: Tensor, values: np.ndarray, row: Row) -> None:
        pool = self.state.pools.tensors[kind]
        newest = pool[:, rows.long(), pool.shape[2] // 2 - 1].numpy()  # B half of C4, kv of C128
        for layer in range(LAYERS):
            want = salted(values, layer + SALT[kind])
            right = np.array_equal(newest[layer], want)
            where = f"{kind} layer {layer} slot {row.slot}"
            message = "" if right else f"{where}: live rows {newest[layer]} are not {want}"
            self.checks.require("spec_equivalence", right, message)

    def _check_stores(self, launch: Launch, meta: StepMeta, starts: list[int]) -> None:
        """Stored positions are the forward's own, and all of them where W1 asks for that."""
        ring = self.geometry.c4.ring
        pages = set((meta.c4_store[meta.c4_store >= 0] // ring).tolist())
        self.checks.require(
            "frontier",
            not pages & launch.published,
            f"rows are stored in published pages {pages & launch.published}",
        )
        real = meta.row_req >= 0
        if launch.store_all:
            stored = bool((meta.c4_store[real] >= 0).all() and (meta.c128_store[real] >= 0).all())
            self.checks.require("frontier", stored, "a verify does not store all of its rows")
            return
        for i, (row, start) in enumerate(zip(launch.rows, starts, strict=True)):
            end, mine = start + row.length, meta.row_req == i
            pos = meta.pos[mine]
            needed = (pos >= end // 4 * 4 - 4) | (pos % PAGE >= PAGE - 4)
            complete = bool((meta.c4_store[mine][needed] >= 0).all())
            self.checks.require(
                "frontier", complete, f"prefill {start}..{end} drops needed c4 rows"
            )
            open_block = bool((meta.c128_store[mine][pos >= end // 128 * 128] >= 0).all())
            self.checks.require("frontier", open_block, f"prefill {start}..{end} drops c128 rows")

    def _check_first_use(self, launch: Launch) -> None:
        for row in launch.rows:
            if row.fresh:
                block = self.state.pools.tensors["c128"].unflatten(1, (-1, self.geometry.c128.ring))
                empty = bool(empty_rows(block[:, row.slot]).all())
                self.checks.require(
                    "empty_at_first_use", empty, f"slot {row.slot} is not empty at first use"
                )
        for kind in ("c4", "idx"):
            block = self.state.pools.tensors[kind].unflatten(1, (-1, self.geometry.c4.ring))
            for page in launch.first_use:
                empty = bool(empty_rows(block[:, page]).all())
                self.checks.require(
                    "empty_at_first_use", empty, f"{kind} page {page} is not empty at first use"
                )

    def _note_writes(self, launch: Launch, meta: StepMeta) -> None:
        """Who wrote where; a new owner's first write must come after the clear."""
        if not self.expect_empty:
            return
        pages = set((meta.c4_store[meta.c4_store >= 0] // self.geometry.c4.ring).tolist())
        for page in pages:
            owner, before = launch.epoch.get(page), self.page_written.get(page)
            self.checks.require(
                "order",
                before is None or before == owner,
                f"page {page} of epoch {owner} still holds rows of epoch {before}",
            )
            self.page_written[page] = owner if owner is not None else -1
        for row in launch.rows:
            before = self.slot_written.get(row.slot)
            self.checks.require(
                "order",
                before is None or before == row.generation,
                f"slot {row.slot} of generation {row.generation} holds rows of {before}",
            )
            self.slot_written[row.slot] = row.generation

    def check_padding(self) -> None:
        now = self._padding_rows()
        for kind, rows in now.items():
            same = torch.equal(bits(rows), bits(self.padding_before[kind]))
            self.checks.require("padding", same, f"{kind} rows of slot 0 or page 0 changed")

    def _padding_rows(self) -> dict[str, Tensor]:
        rows = {
            kind: pool[:, : self.geometry.ring(kind).ring].clone()
            for kind, pool in self.state.pools.tensors.items()
        }
        entries = {
            f"{kind} entries": pool[:, : 2 if kind == "c128" else 64].clone()
            for kind, pool in self.entries.items()
        }
        return rows | entries

    def poison(self) -> None:
        """Every byte of state and entries becomes NaN."""
        for pool in (*self.state.pools.tensors.values(), *self.entries.values()):
            pool.fill_(torch.nan)
        self.padding_before = self._padding_rows()


def narrow_geometry(
    *, slots: int, window_pages: int, verify_width: int = 6, c4: int = 16, c128: int = 136
) -> StateGeometry:
    """Real rings with narrow rows: width 4 for C4 and indexer, 2 for C128."""
    return StateGeometry(
        slots=slots,
        window_pages=window_pages,
        page=PAGE,
        verify_width=verify_width,
        c4=RingSpec(ratio=4, window=8, ring=c4, width=4, layers=LAYERS),
        idx=RingSpec(ratio=4, window=8, ring=c4, width=4, layers=LAYERS),
        c128=RingSpec(ratio=128, window=128, ring=c128, width=2, layers=LAYERS),
    )


def masked_run(first: Tensor, offsets: Tensor) -> Tensor:
    """[n, k] rows first..first+k-1, or -1 throughout where first is -1."""
    return torch.where(first[:, None] >= 0, first[:, None] + offsets, -1)


def bits(rows: Tensor) -> Tensor:
    return rows.view(torch.int32)


def differing(after: Tensor, before: Tensor) -> set[int]:
    """Rows that differ in any layer, NaN equal to itself."""
    return set((bits(after) != bits(before)).any(-1).any(0).nonzero().flatten().tolist())
