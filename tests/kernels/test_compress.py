"""The compressors' reference against a brute-force compressor that keeps the whole sequence."""

import pytest
import torch

from dspark.kernels.common.index_pages import PACKED_STRIDE
from dspark.kernels.common.kv_pages import load_slots, page_stride
from dspark.kernels.compress import CompressRows, Stream, c4_compress_pair, c128_compress
from dspark.kernels.compress.reference import c4_compress

EPS = 1e-6
PAGE, RING_C4, RING_C128 = 256, 16, 256


def table(positions: int = 1024) -> torch.Tensor:
    angle = torch.arange(positions)[:, None] * 160000.0 ** (-torch.arange(0, 64, 2) / 64)
    return torch.cat([angle.cos(), angle.sin()], 1).float()


class Compressor:
    """One layer's compressor of one request whose tokens sit in consecutive slots from `page` on.

    Float pools, so that the comparison with the brute force is tight.
    """

    def __init__(self, ratio: int, width: int, tokens: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.ratio, self.width = ratio, width
        halves = 2 if ratio == 4 else 1
        self.raw = torch.randn(tokens, 2 * halves * width, generator=generator)
        self.ape = torch.randn(halves * ratio, width, generator=generator)
        self.norm = torch.rand(width, generator=generator) + 0.5
        self.pages = 2 + tokens // PAGE
        self.page, self.slot = 1, 3  # first page and request slot of this request
        ring_rows = self.pages * RING_C4 if ratio == 4 else 5 * RING_C128
        # An unwritten ring row is kv 0, score -inf.
        self.state = torch.zeros(ring_rows, 2, halves * width)
        self.state[:, 1] = -torch.inf
        self.state = self.state.flatten(1)
        self.per_page = PAGE // ratio
        self.pool = torch.full((self.pages, self.per_page * width), torch.nan)

    def c4_row(self, pos: torch.Tensor) -> torch.Tensor:
        slot = self.page * PAGE + pos
        return torch.where(pos < 0, -1, slot // PAGE * RING_C4 + slot % RING_C4)

    def addresses(self, start: int, stop: int) -> CompressRows:
        """Of positions start..stop-1; the last writer of a ring row stores."""
        pos = torch.arange(start, stop)
        in_req = pos - start
        if self.ratio == 4:
            plan = [pos, self.c4_row(pos - 7), self.c4_row(pos - 3), in_req]
            last = (pos + RING_C4 >= stop) | (pos % PAGE >= PAGE - RING_C4)
            store = torch.where(last, self.c4_row(pos), -1)
        else:
            base = torch.full_like(pos, self.slot * RING_C128)
            plan = [pos, base, torch.full_like(pos, RING_C128), in_req]
            store = torch.where(pos + RING_C128 >= stop, base + pos % RING_C128, -1)
        closes = (pos + 1) % self.ratio == 0
        entry = torch.where(closes, (self.page * PAGE + pos) // self.ratio, -1)
        return CompressRows(torch.stack(plan, 1).int(), store.int(), entry.int())

    def forward(self, start: int, stop: int) -> None:
        self.run(self.raw[start:stop], self.addresses(start, stop))

    def run(self, s: torch.Tensor, rows: CompressRows) -> None:
        stream = Stream(s, self.ape, self.state, self.norm, self.pool)
        arguments = (stream, rows, table(), self.per_page, EPS)
        if self.ratio == 4:
            c4_compress(*arguments, index=self.width == 128)
        else:
            c128_compress(*arguments)

    def entries(self, count: int) -> torch.Tensor:
        first = self.page * self.per_page
        return self.pool.view(-1, self.width)[first : first + count]

    def brute_force(self, count: int) -> torch.Tensor:
        """Entries from the formulas, with nothing but the raw rows of the whole sequence."""
        d, r, raw = self.width, self.ratio, self.raw.double()
        cos_sin, out = table().double(), []
        for w in range(count):
            own = raw[w * r : (w + 1) * r]
            if r == 4:
                kv, score = own[:, d : 2 * d], own[:, 3 * d :] + self.ape[4:]
                if w:
                    before = raw[(w - 1) * r : w * r]
                    kv = torch.cat([before[:, :d], kv])
                    score = torch.cat([before[:, 2 * d : 3 * d] + self.ape[:4], score])
            else:
                kv, score = own[:, :d], own[:, d:] + self.ape
            e = (score.softmax(0) * kv).sum(0)
            e = e / (e.pow(2).mean() + EPS).sqrt() * self.norm
            even, odd = e[-64::2].clone(), e[-63::2].clone()
            cos, sin = cos_sin[w * r, :32], cos_sin[w * r, 32:]
            e[-64::2], e[-63::2] = even * cos - odd * sin, even * sin + odd * cos
            if self.width == 128:
                e = walsh(e)
            out.append(e)
        return torch.stack(out).float()


def walsh(x: torch.Tensor) -> torch.Tensor:
    """Fast Walsh-Hadamard butterflies, natural (Sylvester) order, orthonormal."""
    y, span = x.clone(), 1
    while span < 128:
        pairs = y.view(-1, 2, span)
        y = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).flatten()
        span *= 2
    return y / 128**0.5


def chunks(total: int, sizes) -> list[tuple[int, int]]:
    start, out = 0, []
    while start < total:
        stop = min(start + sizes[len(out) % len(sizes)], total)
        out.append((start, stop))
        start = stop
    return out


@pytest.mark.parametrize("width", [512, 128])
@pytest.mark.parametrize(
    "sizes", [[300], [1], [6], [5, 1, 2], [3, 6, 4], [255, 1, 2], [17, 6, 1, 1, 30], [7]]
)
def test_c4_equals_brute_force_over_ragged_chunks(width, sizes):
    c = Compressor(4, width, 300)
    for start, stop in chunks(300, sizes):
        c.forward(start, stop)
    torch.testing.assert_close(c.entries(75), c.brute_force(75), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("sizes", [[400], [127, 1, 6], [6, 5, 4], [128], [129, 100], [50, 7, 200]])
def test_c128_equals_brute_force_over_ragged_chunks(sizes):
    c = Compressor(128, 512, 400)
    for start, stop in chunks(400, sizes):
        c.forward(start, stop)
    torch.testing.assert_close(c.entries(3), c.brute_force(3), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("alignment", range(8))
@pytest.mark.parametrize("rows", range(1, 9))
def test_c4_every_alignment_of_prefill_then_verify(alignment, rows):
    c = Compressor(4, 128, 40)
    c.forward(0, 16 + alignment)
    for start, stop in chunks(40 - 16 - alignment, [rows]):
        c.forward(start + 16 + alignment, stop + 16 + alignment)
    torch.testing.assert_close(c.entries(10), c.brute_force(10), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("commit", range(1, 7))
@pytest.mark.parametrize(("ratio", "width", "prefix"), [(4, 512, 10), (128, 512, 120)])
def test_rejected_rows_leave_no_trace(ratio, width, prefix, commit):
    """Verify 6 rows, commit some, run the rest again with other contents: as if never drafted."""
    c = Compressor(ratio, width, prefix + 40)
    truth = c.raw.clone()
    c.forward(0, prefix)
    length = prefix
    while length + 6 <= c.raw.shape[0]:
        c.raw[length + commit : length + 6] = 1e3  # the drafts that will be rejected
        c.forward(length, length + 6)
        c.raw = truth.clone()
        length += commit
    count = length // ratio
    torch.testing.assert_close(c.entries(count), c.brute_force(count), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("ratio", "width"), [(4, 512), (4, 128), (128, 512)])
def test_requests_share_a_batch_without_mixing(ratio, width):
    """Two requests' rows in one launch give the bits each gets alone; padded rows do nothing."""
    a = Compressor(ratio, width, 300, seed=1)
    a.forward(0, 250)
    a.forward(250, 256)
    b = Compressor(ratio, width, 300, seed=1)
    b.forward(0, 250)
    plan, store, entry = b.addresses(250, 256)
    # The other request reads the same ring, stores nothing and emits into page 0.
    elsewhere = torch.where(entry >= 0, torch.arange(6), -1).int()
    pad = torch.full((2,), -1, dtype=torch.int32)
    padded_plan = torch.tensor([[0, -1, -1, 0]] * 2).int()
    b.run(
        torch.cat([b.raw[250:256] * 2, b.raw[250:256], torch.full((2, b.raw.shape[1]), torch.nan)]),
        CompressRows(
            torch.cat([plan, plan, padded_plan]),
            torch.cat([torch.full_like(store, -1), store, pad]),
            torch.cat([elsewhere, entry, pad]),
        ),
    )
    count = 256 // ratio
    assert torch.equal(a.entries(count), b.entries(count))
    assert torch.equal(a.state, b.state)


def test_formed_before_stored():
    """In one launch a raw row may land in a ring row that an entry of the launch still reads."""
    c = Compressor(4, 128, 24)
    c.forward(0, 7)
    rows = c.addresses(7, 8)
    rows.store[:] = c.c4_row(torch.tensor([0])).int()  # ring row of position 0, which entry 1 reads
    c.run(c.raw[7:8], rows)
    torch.testing.assert_close(c.entries(2), c.brute_force(2), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("ratio", "width"), [(4, 512), (4, 128), (128, 512)])
def test_all_empty_window_gives_zero(ratio, width):
    c = Compressor(ratio, width, 256)
    c.raw[:, c.raw.shape[1] // 2 :] = -torch.inf
    c.raw[:, : c.raw.shape[1] // 2] = 0
    c.forward(0, 128)
    count = 128 // ratio
    assert torch.equal(c.entries(count), torch.zeros(count, width))


def test_first_window_ignores_the_ring():
    c = Compressor(4, 512, 8)
    c.state.fill_(torch.nan)
    c.forward(0, 8)
    torch.testing.assert_close(c.entries(2), c.brute_force(2), atol=2e-6, rtol=1e-5)


def test_pair_runs_both_compressors():
    parts = []
    for width in (512, 128):
        c = Compressor(4, width, 64)
        rows = c.addresses(0, 64)
        parts.append((c, Stream(c.raw, c.ape, c.state, c.norm, c.pool)))
    c4_compress_pair(*(s for _, s in parts), rows, table(), running=False)
    for c, _ in parts:
        torch.testing.assert_close(c.entries(16), c.brute_force(16), atol=2e-6, rtol=1e-5)


def test_packed_pools_hold_the_quantised_entries():
    c = Compressor(4, 512, 64)
    plain = c.pool
    c.forward(0, 64)
    c.pool = torch.zeros(c.pages, page_stride(64), dtype=torch.uint8)
    c.forward(0, 64)
    slots = torch.arange(64, 80)
    exact, packed = load_slots(plain, 64, slots), load_slots(c.pool, 64, slots)
    assert torch.equal(packed[:, 448:], exact[:, 448:].bfloat16().double())
    assert (packed - exact).abs().max() <= exact.abs().max() * 2**-4

    i = Compressor(4, 128, 64)
    i.forward(0, 64)
    exact = i.entries(16)
    i.pool = torch.zeros(i.pages, PACKED_STRIDE, dtype=torch.uint8)
    i.forward(0, 64)
    codes = i.pool[1, : 16 * 128].view(torch.float8_e4m3fn).view(16, 128).float()
    scales = i.pool[1, 64 * 128 :].view(torch.float32)[:16]
    assert torch.equal(scales, exact.abs().amax(1).clamp(min=1e-4) / 448)
    torch.testing.assert_close(codes * scales[:, None], exact, atol=0.05, rtol=2**-4)
    assert (i.pool[0] == 0).all()


def test_errors():
    main, index = Compressor(4, 512, 8), Compressor(4, 128, 8)
    rows = main.addresses(0, 8)
    streams = [Stream(c.raw, c.ape, c.state, c.norm, c.pool) for c in (main, index)]

    def run(main, index, rows):
        c4_compress_pair(main, index, rows, table(), running=True)

    narrow = [stream._replace(s=stream.s[:, :256]) for stream in streams]
    with pytest.raises(ValueError, match=r"s and state \[\*, 2048\]"):
        run(narrow[0], streams[1], rows)
    with pytest.raises(ValueError, match=r"s and state \[\*, 512\]"):
        run(streams[0], narrow[1], rows)
    with pytest.raises(ValueError, match="must cover 8 rows"):
        run(*streams, rows._replace(store=rows.store[:4]))
