"""Sparse attention on a GPU at serving shapes, against the fp64 reference on the CPU."""

import pytest
import torch
from kv_cases import Attention, assert_close, attention_case

from dspark.kernels.attention import kernel
from dspark.kernels.common.kv_pages import page_stride

pytestmark = pytest.mark.gpu


def check(case: Attention, device: torch.device) -> torch.Tensor:
    out = case.to(device).run()
    assert_close(out, case.reference())
    return out


@pytest.mark.parametrize("rows", [1, 6, 8, 48, 64, 65, 200])
def test_c4_rows(device, rows):
    check(attention_case(rows, 8, 128, 512, seed=rows), device)


@pytest.mark.parametrize("rows", [6, 70])
@pytest.mark.parametrize("heads", [4, 8, 16, 32, 64])
def test_head_counts(device, heads, rows):
    check(attention_case(rows, heads, 128, 70, seed=heads), device)


@pytest.mark.parametrize("rows", [3, 66])
@pytest.mark.parametrize("width", [1, 63, 64, 65, 128, 133, 192, 256, 646])
def test_list_widths(device, width, rows):
    check(attention_case(rows, 8, width, seed=width), device)


@pytest.mark.parametrize("entries", [1, 2, 64, 65, 513, 1100])
def test_c128_lists(device, entries):
    check(attention_case(6, 8, 128, entries, per_page=2, seed=entries), device)


@pytest.mark.parametrize("entries", [0, 512])
def test_rows_do_not_depend_on_their_batch(device, entries):
    case = attention_case(48, 8, 128, entries, seed=1).to(device)
    whole = case.run()
    order = torch.randperm(48)
    for rows in [*torch.arange(48).split(1), order[:6], order[6:14], order]:
        assert torch.equal(case.rows(rows.to(device)).run(), whole[rows.to(device)])


def test_prefill_rows_do_not_depend_on_their_batch(device):
    case = attention_case(300, 8, 128, 512, seed=2).to(device)
    whole = case.run()
    order = torch.randperm(300, device=device)
    for rows in (order[:80], order[:44], order[:1]):
        assert torch.equal(case.rows(rows).run(running=False), whole[rows])


def test_two_runs_are_equal(device):
    case = attention_case(48, 8, 128, 512, seed=3).to(device)
    assert torch.equal(case.run(), case.run())


def test_list_width_and_head_count_do_not_change_bits(device):
    case = attention_case(8, 64, 128, 300, seed=4).to(device)
    whole = case.run()
    pad = torch.full((8, 8192), -1, dtype=torch.int32, device=device)
    listed = case.compressed
    wider = case._replace(compressed=listed._replace(idx=torch.cat([listed.idx, pad], 1)))
    assert torch.equal(wider.run(), whole)
    for first in range(0, 64, 8):
        heads = slice(first, first + 8)
        rank = case._replace(q=case.q[:, heads], sink=case.sink[heads])
        assert torch.equal(rank.run(), whole[:, heads])


@pytest.mark.parametrize("rows", [4, 70])
def test_nan_everywhere_nobody_looks(device, rows):
    """NaN queries in rows with empty lists, NaN pages, NaN workspace (poisoned `empty`)."""
    case = attention_case(rows, 8, 128, 64, seed=5)
    case.window.length[1::2] = 0
    case.compressed.length[1::2] = 0
    case.window.idx[1::2] = -1
    case.compressed.idx[1::2] = -1
    case.q[1::2] = torch.nan
    out = check(case, device)
    assert torch.equal(out[1::2], torch.zeros_like(out[1::2]))


@pytest.mark.parametrize("rows", [2, 66])
def test_pool_beyond_two_to_the_31(device, rows):
    """The same slots on the last pages of a pool of more than 2^31 bytes."""
    case = attention_case(rows, 8, 128, seed=6)
    pages = 2**31 // page_stride(256) + 10
    big = torch.zeros(pages, page_stride(256), dtype=torch.uint8, device=device)
    small = case.window.pool.shape[0]
    big[-small:] = case.window.pool.to(device)
    shift = (pages - small) * 256
    moved = case.to(device)
    idx = torch.where(moved.window.idx >= 0, moved.window.idx + shift, -1)
    moved = moved._replace(window=moved.window._replace(pool=big, idx=idx))
    assert torch.equal(moved.run(), case.to(device).run())


def test_graph_replays_with_fewer_rows(device):
    case = attention_case(8, 8, 128, 512, seed=7).to(device)
    expected = case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run()
    case.window.length[5:] = 0
    case.compressed.length[5:] = 0
    case.q[5:] = torch.nan
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out[:5], expected[:5])
    assert torch.equal(out[5:], torch.zeros_like(out[5:]))


def test_verify_rows_of_many_requests_in_a_graph(device):
    """48 requests of six rows: captured, and with the bits of the same rows in a small batch."""
    case = attention_case(288, 8, 128, 512, seed=8).to(device)
    case.run(running=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(running=True)
    graph.replay()
    for rows in torch.arange(288, device=device).split(6):
        assert torch.equal(case.rows(rows).run(), out[rows])


def test_few_variants_serve_every_shape(device):
    """Rows, widths and contexts of any size share a bounded number of compiled kernels."""
    for rows in (1, 2, 3, 5, 16, 17, 48, 64):
        for entries in (0, 1, 15, 16, 17, 100, 512):
            attention_case(rows, 8, 128 + rows % 3, entries).to(device).run()
    for name in ("_decode", "_combine"):
        caches = getattr(kernel, name).device_caches
        assert sum(len(cache[0]) for cache in caches.values()) <= 4, name
