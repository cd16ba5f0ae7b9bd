"""Indexer on a GPU at serving shapes, against the references."""

import pytest
import torch
from kv_cases import Index, fp8_steps, index_case, rope_table

from dspark.kernels.common.index_pages import PACKED_STRIDE
from dspark.kernels.indexer import (
    IndexQuery,
    index_logits,
    index_q,
    index_select,
    index_topk,
    reference,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "heads"), [(1, 64), (48, 64), (7, 16), (3, 8)])
def test_index_q(device, rows, heads):
    generator = torch.Generator().manual_seed(rows)
    arguments = (
        torch.randn(rows, heads, 128, generator=generator).bfloat16(),
        torch.randn(rows, heads, generator=generator).bfloat16(),
        rope_table(),
        torch.randint(0, 64, (rows,), generator=generator),
    )
    got, want = index_q(*(x.to(device) for x in arguments)), reference.index_q(*arguments)
    steps = fp8_steps(got.q, want.q)
    assert steps.max() <= 1
    assert (steps > 0).float().mean() <= 1e-3
    torch.testing.assert_close(got.weight.cpu(), want.weight, rtol=1e-6, atol=0)


def verify_case(requests: int = 8, entries: int = 2000, heads: int = 64) -> Index:
    """Six rows a request, lengths around page borders, then two padded rows."""
    lengths = [entries - 7 * r + j // 2 for r in range(requests) for j in range(6)]
    row_req = [r for r in range(requests) for _ in range(6)]
    return index_case([*row_req, -1, -1], [*lengths, 0, 0], heads)


@pytest.mark.parametrize("heads", [64, 16])
def test_logits(device, heads):
    case = verify_case(heads=heads)
    got = index_logits(*case.to(device), 2048).cpu()
    want = reference.index_logits(*case, 2048)
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    error = (got - want)[finite].double()
    assert error.norm() <= 1e-4 * want[finite].double().norm()


def test_rows_do_not_depend_on_their_batch(device):
    case = verify_case().to(device)
    whole = index_logits(*case, 2048)
    order = torch.randperm(50, device=device)
    for rows in [*order[:12].split(1), order[12:18], order.sort().values]:
        assert torch.equal(index_logits(*case.rows(rows), 2048), whole[rows])


@pytest.mark.parametrize("k", [1, 16, 512])
@pytest.mark.parametrize("kind", ["random", "ties", "signed zeros"])
def test_topk_is_exact_around_every_boundary(device, k, kind):
    generator = torch.Generator().manual_seed(1)
    width = 9000
    lengths = [0, k - 1, k, k + 1, 2 * k, 2047, 2048, 2049, 4096, 4097, 8999, width]
    length = torch.tensor(sorted(lengths)).int()
    logits = torch.randn(len(length), width, generator=generator)
    if kind == "ties":
        logits = logits.round()
    if kind == "signed zeros":
        logits *= 0
    logits = logits.masked_fill(torch.arange(width) >= length[:, None], torch.nan)
    pages = torch.randperm(200, generator=generator).int()[None]
    rest = (length, pages, torch.zeros(len(length)).int())
    got = index_topk(logits.to(device), *(x.to(device) for x in rest), k)
    want = reference.index_topk(logits.nan_to_num(-torch.inf), *rest, k)
    for name in got._fields:
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name


def test_nan_disturbs_no_other_request(device):
    """NaN in one request's query and keys: the others select as before, it selects something."""
    case = verify_case(requests=3).to(device)
    clean = index_select(*case, 2048, 512)
    case.query.weight[8] = torch.nan
    case.pool[case.page_table[2, 3].long()] = 255
    top = index_select(*case, 2048, 512)
    others = [t for t in range(12) if t != 8]
    for got, want in zip(top, clean, strict=True):
        assert torch.equal(got[others], want[others])
    assert top.logical[8].tolist() == list(range(512))
    assert not torch.isin(top.logical[12:18], torch.arange(192, 256, device=device)).any()


@pytest.mark.parametrize("length", [4096, 4097, 32_768, 32_769])
def test_topk_across_the_levels_of_the_tournament(device, length):
    generator = torch.Generator().manual_seed(length)
    logits = torch.randn(3, 40_000, generator=generator)
    logits[1] = logits[1].round()
    logits[2, ::2] = torch.nan
    rest = (torch.full((3,), length).int(), torch.arange(625)[None].int(), torch.zeros(3).int())
    got = index_topk(logits.to(device), *(x.to(device) for x in rest), 512)
    beyond = torch.arange(40_000) >= length
    want = reference.index_topk(logits.masked_fill(beyond, -torch.inf), *rest, 512)
    for name in got._fields:
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name


@pytest.mark.parametrize("entries", [511, 513, 600, 1024, 2000])
@pytest.mark.parametrize("distinct", [0, 7])
def test_decode_and_verify_select_the_same_set(device, entries, distinct):
    case = index_case([0] * 6, [entries + j for j in range(6)], 64, distinct=distinct).to(device)
    whole = index_select(*case, 2048, 512)
    logits = index_logits(*case, 2048)
    longer = index_topk(logits, case.c4_len, case.page_table, case.row_req, 512)
    assert all(torch.equal(a, b) for a, b in zip(whole, longer, strict=True))
    for t in range(6):
        alone = index_select(*case.rows(torch.tensor([t], device=device)), 4096, 512)
        for name in whole._fields:
            assert torch.equal(getattr(alone, name)[0], getattr(whole, name)[t]), name


def test_long_context(device):
    """One million tokens: 262,144 entries; the selection equals a stable sort of its logits."""
    case = index_case([0], [262_144], 64, distinct=5000).to(device)
    logits = index_logits(*case, 262_144)
    top = index_select(*case, 262_144, 512)
    order = logits[0].sort(descending=True, stable=True).indices[:512].sort().values
    assert torch.equal(top.logical[0], order.int())


def test_pool_beyond_two_to_the_31(device):
    case = index_case([0, 0], [300, 301], 64).to(device)
    pages = 2**31 // PACKED_STRIDE + 10
    big = torch.zeros(pages, PACKED_STRIDE, dtype=torch.uint8, device=device)
    big[-case.pool.shape[0] :] = case.pool
    moved = case._replace(pool=big, page_table=case.page_table + pages - case.pool.shape[0])
    assert torch.equal(index_logits(*moved, 320), index_logits(*case, 320))


def test_graph_replays_with_other_lengths(device):
    case = verify_case().to(device)
    graph = torch.cuda.CUDAGraph()
    index_select(*case, 2048, 512)
    with torch.cuda.graph(graph):
        top = index_select(*case, 2048, 512)
    case.c4_len.sub_(1000).clamp_(min=0)
    graph.replay()
    want = index_select(*case, 2048, 512)
    assert all(torch.equal(a, b) for a, b in zip(top, want, strict=True))


def test_no_rows(device):
    case = verify_case().to(device)
    none = IndexQuery(case.query.q[:0], case.query.weight[:0])
    empty = case.row_req[:0]
    top = index_select(none, case.pool, case.page_table, empty, empty, 2048, 512)
    assert top.slot.shape == (0, 512)
