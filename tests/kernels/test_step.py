"""Addresses against a brute-force oracle that walks rows and positions one by one."""

import dataclasses

import pytest
import torch

from dspark.kernels.step import (
    BatchRows,
    BlockRows,
    Bounds,
    Rings,
    Tables,
    draft_meta,
    empty_draft_meta,
    empty_step_meta,
    step_meta,
)

PAGE = 256
BOUNDS = Bounds(window=128, max_pages=6, max_c128=12)


@dataclasses.dataclass
class Batch:
    """Requests with shuffled pages, as an allocator leaves them after some churn."""

    request_slot: list[int]
    committed: list[int]
    row_len: list[int]
    rows: int
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        slots, pages_a_slot = 8, 6
        full = torch.randperm(slots * pages_a_slot, generator=generator) + 1
        swa = torch.randperm(slots * pages_a_slot, generator=generator) + 1
        token = torch.arange(PAGE)
        self.token_slot = torch.zeros(slots, pages_a_slot * PAGE, dtype=torch.int32)
        self.window_slot = torch.zeros((slots * pages_a_slot + 1) * PAGE, dtype=torch.int64)
        for i, (f, s) in enumerate(zip(full.tolist(), swa.tolist(), strict=True)):
            slot, page = divmod(i, pages_a_slot)
            self.token_slot[slot, page * PAGE + token] = (f * PAGE + token).int()
            self.window_slot[f * PAGE + token] = s * PAGE + token
        locations = [
            int(self.token_slot[slot, prefix + r])
            for slot, prefix, n in self.requests()
            if slot >= 0
            for r in range(n)
        ]
        self.full_slot = torch.zeros(self.rows, dtype=torch.int64)
        self.full_slot[: len(locations)] = torch.tensor(locations, dtype=torch.int64)

    def requests(self) -> list[tuple[int, int, int]]:
        return list(zip(self.request_slot, self.committed, self.row_len, strict=True))

    def window_of(self, slot: int, pos: int) -> int:
        return int(self.window_slot[int(self.token_slot[slot, pos])])

    def tables(self) -> Tables:
        return Tables(self.token_slot, self.window_slot)

    def batch_rows(self, width: int | None = None) -> BatchRows:
        per_request = self.request_slot, self.committed, self.row_len
        return BatchRows(*map(whole_numbers, per_request), self.rows, width)

    def block(self, valid_from: list[int]) -> BlockRows:
        per_request = self.request_slot, self.committed, valid_from
        return BlockRows(*map(whole_numbers, per_request), gamma=5)


def whole_numbers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def run(batch: Batch, *, store_all: bool, ring_c4=16, ring_c128=136, width=None, out=None):
    rings = Rings(ring_c4, ring_c128)
    rows = batch.batch_rows(width)
    return step_meta(rows, batch.tables(), BOUNDS, rings, store_all=store_all, out=out)


def must_store(pos: int, end: int, ratio: int) -> bool:
    """What a chunk without rollback has to keep (open block; C4: block before, page tails)."""
    if ratio == 128:
        return pos >= end // 128 * 128
    return pos >= end // 4 * 4 - 4 or pos % PAGE >= PAGE - 4


def check_against_oracle(batch, meta, *, store_all, window=128, ring_c4=16, ring_c128=136):
    row = 0
    for request, (slot, prefix, n) in enumerate(batch.requests()):
        tokens = prefix + n if slot >= 0 else 0
        pages = [
            int(batch.token_slot[slot, p * PAGE]) // PAGE if p * PAGE < tokens else -1
            for p in range(6)
        ]
        assert meta.page_table[request].tolist() == pages
        if slot < 0:
            continue
        for r in range(n):
            pos, full = prefix + r, int(batch.full_slot[row])
            window_positions = range(max(0, pos - window + 1), pos + 1)
            window_slots = [batch.window_of(slot, p) for p in window_positions]
            assert meta.pos[row] == pos
            assert meta.row_req[row] == request
            assert meta.row_in_req[row] == r
            assert meta.window_slot[row] == batch.window_of(slot, pos)
            assert meta.c4_entry[row] == (full // 4 if pos % 4 == 3 else -1)
            assert meta.c128_entry[row] == (full // 128 if pos % 128 == 127 else -1)
            assert meta.window_len[row] == len(window_slots)
            assert meta.window_seen[row].tolist() == window_slots + [-1] * (
                window - len(window_slots)
            )
            assert meta.c4_len[row] == (pos + 1) // 4
            entries = [int(batch.token_slot[slot, j * 128]) // 128 for j in range((pos + 1) // 128)]
            assert meta.c128_len[row] == len(entries)
            assert meta.c128_seen[row].tolist() == entries + [-1] * (12 - len(entries))

            def c4_row(p, slot=slot):
                if p < 0:
                    return -1
                window_slot = batch.window_of(slot, p)
                return window_slot // PAGE * ring_c4 + window_slot % ring_c4

            assert meta.c4_plan[row].tolist() == [pos, c4_row(pos - 7), c4_row(pos - 3), r]
            assert meta.c128_plan[row].tolist() == [pos, slot * ring_c128, ring_c128, r]
            keep_c4 = store_all or must_store(pos, prefix + n, 4)
            keep_c128 = store_all or must_store(pos, prefix + n, 128)
            if meta.c4_store[row] != -1 or keep_c4:
                assert meta.c4_store[row] == c4_row(pos)
            if meta.c128_store[row] != -1 or keep_c128:
                assert meta.c128_store[row] == slot * ring_c128 + pos % ring_c128
            row += 1
    for name, value in meta._asdict().items():
        if name in ("pos", "row_in_req", "window_len", "c4_len", "c128_len"):
            assert (value[row:] == 0).all(), name
        elif name in ("c4_plan", "c128_plan"):
            assert (value[row:, 1] == -1).all(), name
            assert (value[row:, 0] == 0).all(), name
        elif name != "page_table":
            assert (value[row:] == -1).all(), name


def assert_no_shared_ring_row(store: torch.Tensor) -> None:
    rows = store[store >= 0]
    assert rows.unique().numel() == rows.numel()


@pytest.mark.parametrize("position", [0, 1, 3, 122, 126, 127, 128, 251, 254, 255, 256, 383, 511])
def test_verify_rows_match_the_oracle(position):
    batch = Batch([3, 1, 7], [position, 5, max(position - 3, 0)], [6, 1, 4], rows=16)
    meta = run(batch, store_all=True)
    check_against_oracle(batch, meta, store_all=True)
    assert (meta.c4_store[:11] >= 0).all()
    assert (meta.c128_store[:11] >= 0).all()
    assert_no_shared_ring_row(meta.c4_store)
    assert_no_shared_ring_row(meta.c128_store)


@pytest.mark.parametrize(("prefix", "length"), [(0, 1), (0, 300), (131, 400), (256, 257), (7, 700)])
def test_prefill_rows_match_the_oracle(prefix, length):
    batch = Batch([2, 5], [prefix, 0], [length, 9], rows=length + 9)
    meta = run(batch, store_all=False)
    check_against_oracle(batch, meta, store_all=False)
    assert_no_shared_ring_row(meta.c4_store)
    assert_no_shared_ring_row(meta.c128_store)


def test_stored_rows_of_a_straddling_verify():
    """Six rows at 126: C4 rows 94, 95, 80..83 of page 5, C128 rows 894..899 of slot 3."""
    batch = Batch([3], [126], [6], rows=6)
    page = int(batch.window_slot[int(batch.token_slot[3, 0])]) // PAGE
    meta = run(batch, store_all=True, ring_c128=256)
    assert (meta.c4_store - (page - 5) * 16).tolist() == [94, 95, 80, 81, 82, 83]
    assert meta.c128_store.tolist() == [894, 895, 896, 897, 898, 899]
    assert (meta.c4_entry >= 0).tolist() == [False, True, False, False, False, True]
    assert (meta.c128_entry >= 0).tolist() == [False, True, False, False, False, False]


def test_two_rows_of_one_ring_row_keep_the_highest_position():
    batch = Batch([1], [0], [40], rows=40)
    meta = run(batch, store_all=True, ring_c4=8)
    assert (meta.c4_store[:32] == -1).all()
    assert (meta.c4_store[32:] >= 0).all()


def test_padded_requests_touch_nothing():
    real = Batch([3, 4], [130, 17], [6, 2], rows=12)
    padded = Batch([3, -1, 4, 0], [130, 0, 17, 0], [6, 0, 2, 0], rows=12)
    want, got = run(real, store_all=True), run(padded, store_all=True)
    check_against_oracle(padded, got, store_all=True)
    for name in want._fields:
        if name not in ("page_table", "row_req"):
            assert torch.equal(getattr(want, name), getattr(got, name)), name


def test_rows_of_a_fixed_width_equal_packed_rows_with_gaps():
    """Verify lengths 6, 1, 3 in a width of 6: the gaps are padded, the rest is as if packed."""
    packed = Batch([3, 1, 7], [126, 5, 252], [6, 1, 3], rows=10)
    strided = Batch([3, 1, 7], [126, 5, 252], [6, 1, 3], rows=18)
    want, got = run(packed, store_all=True), run(strided, store_all=True, width=6)
    kept = torch.tensor([*range(6), 6, *range(12, 15)])
    gaps = torch.tensor([r for r in range(18) if r not in kept.tolist()])
    for name in want._fields:
        if name != "page_table":
            assert torch.equal(getattr(want, name), getattr(got, name)[kept]), name
    assert (got.row_req[gaps] == -1).all()
    assert (got.window_slot[gaps] == -1).all()
    assert (got.window_len[gaps] == 0).all()
    assert (got.c4_store[gaps] == -1).all()
    assert torch.equal(want.page_table, got.page_table)


def test_no_requests_at_all():
    meta = run(Batch([], [], [], rows=3), store_all=True)
    check_against_oracle(Batch([], [], [], rows=3), meta, store_all=True)
    assert meta.page_table.shape == (0, 6)


def test_out_is_written_in_place_with_the_declared_types():
    batch = Batch([3, 1], [126, 300], [6, 3], rows=10)
    out = empty_step_meta(10, 2, BOUNDS, device=torch.device("cpu"))
    want, got = run(batch, store_all=True), run(batch, store_all=True, out=out)
    assert got is out
    for name, a, b in zip(want._fields, want, got, strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


def test_draft_list_is_window_then_block():
    batch = Batch([3, 1, -1, 2], [300, 4, 0, 140], [5, 5, 0, 5], rows=15)
    valid_from = [0, 2, 0, 256]  # the last request has no draft KV yet: the block sees only itself
    meta = draft_meta(batch.block(valid_from), batch.tables(), window=128)
    for request, (slot, length, _) in enumerate(batch.requests()):
        rows = slice(request * 5, request * 5 + 5)
        if slot < 0:
            assert (meta.seen[rows] == -1).all()
            assert (meta.window_slot[rows] == -1).all()
            assert (meta.pos[rows] == 0).all()
            assert (meta.length[rows] == 0).all()
            continue
        first = min(max(valid_from[request], length - 128, 0), length)
        keys = [batch.window_of(slot, p) for p in range(first, length + 5)]
        assert meta.pos[rows].tolist() == list(range(length, length + 5))
        assert meta.window_slot[rows].tolist() == keys[-5:]
        for row in range(rows.start, rows.stop):
            assert meta.length[row] == len(keys)
            assert meta.seen[row].tolist() == keys + [-1] * (133 - len(keys))


def test_draft_out_is_written_in_place():
    batch = Batch([3, 1], [300, 4], [5, 5], rows=10)
    arguments = {"rows": batch.block([0, 0]), "tables": batch.tables(), "window": 128}
    out = empty_draft_meta(requests=2, gamma=5, window=128, device=torch.device("cpu"))
    want, got = draft_meta(**arguments), draft_meta(**arguments, out=out)
    assert got is out
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ring_c4": 6}, "C4 ring"),
        ({"ring_c128": 127}, "C128 ring"),
    ],
)
def test_bad_rings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        run(Batch([1], [0], [1], rows=1), store_all=True, **change)
