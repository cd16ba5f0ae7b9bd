"""Inputs shared by the tests of the KV, compressor, indexer and attention kernels."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dspark.kernels.attention import SlotList, mla_sparse, reference
from dspark.kernels.common.fp8_kernel import to_e4m3
from dspark.kernels.common.index_pages import KEYS, PACKED_STRIDE, store_index
from dspark.kernels.common.kv_pages import page_stride, store_slots
from dspark.kernels.compress import CompressRows, Stream
from dspark.kernels.indexer import IndexQuery
from dspark.kernels.indexer import reference as index_reference

SCALE = 512**-0.5


def rope_table(positions: int = 64) -> torch.Tensor:
    angle = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    return torch.cat([angle.cos(), angle.sin()], 1).float()


def filled_pool(slots: int, per_page: int, seed: int) -> torch.Tensor:
    """Packed pool whose page 0 is all NaN: nothing may read it. Slots start at `per_page`."""
    generator = torch.Generator().manual_seed(seed)
    pages = 1 + -(-slots // per_page)
    pool = torch.full((pages, page_stride(per_page)), 255, dtype=torch.uint8)
    store_slots(
        pool,
        per_page,
        (per_page + torch.arange(slots)).int(),
        torch.randn(slots, 512, generator=generator),
    )
    return pool


def slot_lists(rows: int, width: int, slots: int, per_page: int, seed: int):
    """Distinct slots off page 0, a -1 tail, and lengths that include the full width."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(0, width + 1, (rows,), generator=generator).int()
    length[0] = width
    idx = torch.stack(
        [torch.randperm(slots, generator=generator)[:width].sort().values for _ in range(rows)]
    )
    idx = (idx + per_page).masked_fill(torch.arange(width) >= length[:, None], -1)
    return idx.int(), length


class Attention(NamedTuple):
    """Arguments of `mla_sparse` in its order."""

    q: torch.Tensor
    window: SlotList
    compressed: SlotList | None
    sink: torch.Tensor
    scale: float
    cos_sin: torch.Tensor | None
    pos: torch.Tensor

    def run(self, running: bool | None = None) -> torch.Tensor:
        return mla_sparse(*self, running=running)

    def reference(self) -> torch.Tensor:
        return reference.mla_sparse(*self)

    def rows(self, rows: torch.Tensor) -> "Attention":
        return self._replace(
            q=self.q[rows],
            window=self.window.rows(rows),
            compressed=self.compressed and self.compressed.rows(rows),
            pos=self.pos[rows],
        )

    def to(self, device: torch.device) -> "Attention":
        return Attention(*(moved(part, device) for part in self))


def moved(part, device: torch.device):
    """A tensor, or the tensors of a slot list, on `device`; anything else as it is."""
    if isinstance(part, SlotList):
        return SlotList(*(moved(field, device) for field in part))
    return part.to(device) if isinstance(part, torch.Tensor) else part


def attention_case(
    rows: int, heads: int, window: int, entries: int = 0, per_page: int = 64, seed: int = 0
) -> Attention:
    """`entries` compressed slots a row at most (0: a window-only layer)."""
    generator = torch.Generator().manual_seed(seed)
    slots = max(window, entries) + 100
    pool = filled_pool(slots, 256, seed + 1)
    listed = SlotList(pool, 256, *slot_lists(rows, window, slots, 256, seed + 2))
    compressed = None
    if entries:
        pool = filled_pool(slots, per_page, seed + 3)
        chosen = slot_lists(rows, entries, slots, per_page, seed + 4)
        compressed = SlotList(pool, per_page, *chosen)
    return Attention(
        torch.randn(rows, heads, 512, generator=generator).bfloat16(),
        listed, compressed,
        torch.randn(heads, generator=generator), SCALE, rope_table(),
        torch.randint(0, 64, (rows,), generator=generator),
    )  # fmt: skip


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """bf16 tolerance of attention against an fp64 reference fed the same inputs."""
    got, want = got.double().cpu(), want.double().cpu()
    assert got.isfinite().all()
    error = got - want
    assert error.pow(2).mean().sqrt() <= 3e-3 * want.pow(2).mean().sqrt()
    assert error.abs().max() <= 1.5e-2 * want.abs().max()


class Index(NamedTuple):
    """Arguments of `index_logits` in its order, without c_max."""

    query: IndexQuery
    pool: torch.Tensor
    page_table: torch.Tensor
    row_req: torch.Tensor
    c4_len: torch.Tensor

    def rows(self, rows: torch.Tensor) -> "Index":
        query = IndexQuery(self.query.q[rows], self.query.weight[rows])
        return self._replace(query=query, row_req=self.row_req[rows], c4_len=self.c4_len[rows])

    def to(self, device: torch.device) -> "Index":
        query = IndexQuery(*(part.to(device) for part in self.query))
        return Index(query, *(part.to(device) for part in self[1:]))


def index_case(
    row_req: list[int], c4_len: list[int], heads: int = 16, seed: int = 0, distinct: int = 0
) -> Index:
    """Each request's keys on shuffled pages among NaN pages; `distinct` > 0 repeats few keys."""
    generator = torch.Generator().manual_seed(seed)
    requests = max(row_req) + 1
    longest = [
        max(n for r, n in zip(row_req, c4_len, strict=True) if r == request)
        for request in range(requests)
    ]
    pages = [-(-n // KEYS) for n in longest]
    order = torch.randperm(sum(pages) + 3, generator=generator).int()
    pool = torch.full((len(order), PACKED_STRIDE), 255, dtype=torch.uint8)
    page_table = torch.full((requests, max(pages)), -1, dtype=torch.int32)
    for request, own in enumerate(order.split([*pages, 3])[:-1]):
        page_table[request, : len(own)] = own
        keys = torch.randn(longest[request], 128, generator=generator)
        if distinct:
            keys = keys[torch.randint(0, distinct, (len(keys),), generator=generator)]
        entry = torch.arange(len(keys))
        store_index(pool, own[entry // KEYS] * KEYS + entry % KEYS, keys)
    rows = len(row_req)
    query = index_query(rows, heads, generator)
    return Index(query, pool, page_table, torch.tensor(row_req).int(), torch.tensor(c4_len).int())


def index_query(rows: int, heads: int, generator: torch.Generator) -> IndexQuery:
    return index_reference.index_q(
        torch.randn(rows, heads, 128, generator=generator).bfloat16(),
        torch.randn(rows, heads, generator=generator).bfloat16(),
        rope_table(),
        torch.randint(0, 64, (rows,), generator=generator),
    )


class Compress(NamedTuple):
    """One compressor and the addresses of its rows."""

    s: torch.Tensor
    ape: torch.Tensor
    state: torch.Tensor
    plan: torch.Tensor
    store: torch.Tensor
    norm_w: torch.Tensor
    cos_sin: torch.Tensor
    entry: torch.Tensor
    pool: torch.Tensor

    def to(self, device: torch.device) -> "Compress":
        """A copy: the op changes `state` and `pool`."""
        return Compress(*(part.to(device, copy=True) for part in self))

    @property
    def stream(self) -> Stream:
        return Stream(self.s, self.ape, self.state, self.norm_w, self.pool)

    @property
    def addresses(self) -> tuple[CompressRows, torch.Tensor]:
        return CompressRows(self.plan, self.store, self.entry), self.cos_sin

    def companion(self) -> Stream:
        """An empty compressor beside this one, for the op that runs the two of a C4 layer."""
        width = 128 if self.norm_w.shape[0] == 512 else 512
        stride = PACKED_STRIDE if width == 128 else page_stride(64)
        return Stream(
            self.s.new_zeros(self.s.shape[0], 4 * width),
            self.ape.new_zeros(8, width),
            self.state.new_zeros(self.state.shape[0], 4 * width),
            self.norm_w.new_ones(width),
            self.pool.new_zeros(self.pool.shape[0], stride),
        )


def run_compressor(implementation, case: Compress, eps: float = 1e-6) -> Compress:
    """`case` through an implementation's op; a C4 compressor runs beside an empty one."""
    terms, width = case.ape.shape
    if terms == 128:
        implementation.c128_compress(case.stream, *case.addresses, 2, eps)
        return case
    streams = (case.stream, case.companion()) if width == 512 else (case.companion(), case.stream)
    implementation.c4_compress_pair(*streams, *case.addresses, 64, eps, running=False)
    return case


def compress_case(
    ratio: int, width: int, requests: list[tuple[int, int]], padded: int = 0, seed: int = 0
) -> Compress:
    """Rows of several requests, each (first position, rows), on a ring of random raw rows.

    C4 requests own one 256-token page each (page 0 stays free); C128 ones a slot of 256 ring rows.
    Unused memory is NaN (pool: 255).
    """
    generator = torch.Generator().manual_seed(seed)
    halves = 2 if ratio == 4 else 1
    columns = 2 * halves * width
    plan, store, entry = [], [], []
    for i, (start, count) in enumerate(requests):
        for pos in range(start, start + count):
            closes = (pos + 1) % ratio == 0
            if ratio == 4:
                page = (i + 1) * 16
                row = [page + p % 16 if p >= 0 else -1 for p in (pos - 7, pos - 3)]
                plan.append([pos, *row, pos - start])
                kept = page + pos % 16 if pos + 16 >= start + count else -1
                slot = (i + 1) * 64 + pos % 256 // 4
            else:
                plan.append([pos, i * 256, 256, pos - start])
                kept = i * 256 + pos % 256
                slot = (i + 1) * 2 + pos % 256 // 128
            store.append(kept)
            entry.append(slot if closes else -1)
    plan += [[0, -1, -1 if ratio == 4 else 256, 0]] * padded
    store += [-1] * padded
    entry += [-1] * padded
    rows = len(plan)
    s = torch.randn(rows, columns, generator=generator)
    s[rows - padded :] = torch.nan
    ring_rows = (len(requests) + 1) * 16 if ratio == 4 else len(requests) * 256
    per_page = 64 if ratio == 4 else 2
    stride = PACKED_STRIDE if width == 128 else page_stride(per_page)
    positions = max(start + count for start, count in requests)
    return Compress(
        s,
        torch.randn(ratio * halves, width, generator=generator),
        torch.randn(ring_rows, columns, generator=generator),
        torch.tensor(plan).int(),
        torch.tensor(store).int(),
        (torch.rand(width, generator=generator) + 0.5).bfloat16(),
        rope_table(positions),
        torch.tensor(entry).int(),
        torch.full((len(requests) + 1, stride), 255, dtype=torch.uint8),
    )


def fp8_steps(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Distance of e4m3 bytes in representable steps (sign-magnitude codes)."""
    low, high = (part.view(torch.uint8).int().cpu() for part in (got, want))
    signed = [torch.where(code < 128, code, 128 - code) for code in (low, high)]
    return (signed[0] - signed[1]).abs()


def assert_pool_close(got: torch.Tensor, want: torch.Tensor, per_page: int | None) -> None:
    """Equal up to values on a rounding border; per_page None: an index pool.

    Scale exponents, untouched memory and all addresses must agree exactly.
    """
    got, want = got.cpu(), want.cpu()
    if per_page is None:
        data, tail = KEYS * 128, torch.float32
        codes = (got[:, :data], want[:, :data])
        scales = (got[:, data:].contiguous().view(tail), want[:, data:].contiguous().view(tail))
        torch.testing.assert_close(*scales, rtol=1e-6, atol=0, equal_nan=True)
    else:
        data = per_page * 576
        assert torch.equal(got[:, data:], want[:, data:])
        slots = [pool[:, :data].reshape(-1, 576) for pool in (got, want)]
        codes = (slots[0][:, :448], slots[1][:, :448])
        rope = [part[:, 448:].contiguous().view(torch.bfloat16) for part in slots]
        torch.testing.assert_close(*rope, rtol=2**-7, atol=1e-6, equal_nan=True)
    steps = fp8_steps(codes[0].contiguous(), codes[1].contiguous())
    assert steps.max() <= 1
    written = (codes[1] != 255).sum()
    assert (steps > 0).sum() <= 1e-3 * written + 2


def fp8_borders() -> torch.Tensor:
    """f32 values at and beside every e4m3 value and every border between two, and the specials."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    borders = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, torch.tensor([464.0, 1e9])])
    # The small nudges (units in the last place) vanish in fp16, the large ones do not.
    nudges = torch.tensor([0, 1, 2, 1 << 10, 1 << 12, 1 << 14])
    nudges = torch.cat([-nudges, nudges])[:, None]
    near = (borders.view(torch.int32) + nudges).clamp(min=0).int().view(torch.float32)
    specials = torch.tensor([torch.inf, torch.nan, 1e-45, 1e-38, 0.0])
    values = torch.cat([near.flatten(), specials])
    return torch.cat([values, -values])


@triton.jit
def _convert(x, codes, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes + i, to_e4m3(tl.load(x + i, mask=i < n, other=0.0)), mask=i < n)


def assert_rounds_once(x: torch.Tensor) -> None:
    """The kernels' conversion of x f32 [N] gives torch's codes; any NaN code stands for NaN."""
    got = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    _convert[(triton.cdiv(len(x), 1024),)](x, got, len(x), BLOCK=1024)
    want = x.cpu().clamp(-448, 448).to(torch.float8_e4m3fn).float()
    got = got.cpu().float()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit() | got.isnan(), want.signbit() | want.isnan())
