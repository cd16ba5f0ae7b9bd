"""The indexer's references: formulas, exact selection around every boundary, bounded memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dspark.kernels.common.index_pages import KEYS, PACKED_STRIDE, load_index, store_index
from dspark.kernels.indexer import index_logits, index_q, index_select, index_topk
from dspark.kernels.indexer import reference as indexer_reference


def table(positions: int = 64) -> torch.Tensor:
    angle = torch.arange(positions)[:, None] * 160000.0 ** (-torch.arange(0, 64, 2) / 64)
    return torch.cat([angle.cos(), angle.sin()], 1).float()


def walsh_matrix() -> torch.Tensor:
    """Sylvester order: entry (i, j) is (-1)^popcount(i & j)."""
    i = range(128)
    return (
        torch.tensor([[(-1.0) ** bin(a & b).count("1") for b in i] for a in i]).double() / 128**0.5
    )


def paged(keys: torch.Tensor, pages: list[int], plain: bool = False):
    """Pool with keys[j] in page pages[j // 64]; all other memory is NaN. Table row for it."""
    shape = (max(pages) + 2, KEYS * 128 if plain else PACKED_STRIDE)
    pool = torch.full(shape, torch.nan) if plain else torch.full(shape, 255, dtype=torch.uint8)
    entry = torch.arange(keys.shape[0])
    table_row = torch.tensor(pages, dtype=torch.int32)
    store_index(pool, table_row[entry // KEYS] * KEYS + entry % KEYS, keys)
    return pool, table_row


def stable_topk(logits: torch.Tensor, length: torch.Tensor, k: int) -> list[list[int]]:
    """Oracle: stable descending sort, so ties keep ascending index; then ascending."""
    out = []
    for row, n in zip(logits.tolist(), length.tolist(), strict=True):
        out.append(sorted(sorted(range(n), key=lambda j: -row[j])[:k]))
    return out


def chosen(top) -> list[list[int]]:
    lists = [row[:n].tolist() for row, n in zip(top.logical, top.length, strict=True)]
    for row, n in zip(top.logical, top.length, strict=True):
        assert (row[n:] == -1).all()
    return lists


def test_index_q_matches_the_formula():
    torch.manual_seed(0)
    q, w, pos = torch.randn(4, 16, 128), torch.randn(4, 16), torch.tensor([0, 5, 9, 63])
    x = q.double()
    cos, sin = (part.double()[:, None] for part in table()[pos].split(32, 1))
    even, odd = x[..., 64::2].clone(), x[..., 65::2].clone()
    x[..., 64::2], x[..., 65::2] = even * cos - odd * sin, even * sin + odd * cos
    x = x @ walsh_matrix()
    got = index_q(q, w, table(), pos)
    torch.testing.assert_close(got.q.double(), x, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got.weight, w * 128**-0.5 * 16**-0.5)

    served = index_q(q.bfloat16(), w.bfloat16(), table(), pos)
    assert served.q.dtype == torch.float8_e4m3fn
    scale = served.weight / (w.bfloat16().float() * (128 * 16) ** -0.5)
    torch.testing.assert_close(scale, x.abs().amax(-1).float() / 448, rtol=1e-2, atol=0)
    back = served.q.float() * scale[..., None]
    assert ((back - x).norm() / x.norm()) < 0.04


@pytest.mark.parametrize("plain", [True, False])
def test_logits_match_the_formula(plain):
    torch.manual_seed(1)
    lengths = [130, 70]
    keys = [torch.randn(n, 128) for n in lengths]
    pool, _ = paged(torch.cat([keys[0], torch.zeros(62, 128), keys[1]]), [4, 1, 6, 3, 2], plain)
    page_table = torch.tensor([[4, 1, 6], [3, 2, -1]]).int()
    query = index_q(
        torch.randn(5, 16, 128).to(torch.float32 if plain else torch.bfloat16),
        torch.randn(5, 16), table(), torch.arange(5),
    )  # fmt: skip
    row_req = torch.tensor([0, 0, 1, -1, 1]).int()
    c4_len = torch.tensor([130, 65, 70, 0, 0]).int()
    logits = index_logits(query, pool, page_table, row_req, c4_len, 192)
    assert logits.shape == (5, 192)
    assert logits.dtype == torch.float32
    for t, (r, n) in enumerate(zip(row_req.tolist(), c4_len.tolist(), strict=True)):
        stored, scale = load_index(pool, page_table[max(r, 0)].long())
        stored = stored if scale is None else stored * scale[:, None]
        dots = (query.q[t].double() @ stored[:n].T).relu()
        torch.testing.assert_close(logits[t, :n].double(), query.weight[t].double() @ dots,
                                   atol=1e-6, rtol=1e-5)  # fmt: skip
        assert (logits[t, n:] == -torch.inf).all()


def test_packed_keys_round_trip():
    torch.manual_seed(2)
    keys = torch.randn(100, 128) * 10 ** torch.linspace(-2, 3, 100)[:, None]
    pool, pages = paged(keys, [2, 0])
    stored, scale = load_index(pool, pages.long())
    assert torch.equal(scale[:100].float(), keys.abs().amax(1) / 448)
    error = (stored * scale[:, None])[:100] - keys.double()
    assert (error.abs() <= keys.abs().amax(1, keepdim=True) * 2**-4).all()


@pytest.mark.parametrize("k", [1, 16, 512])
@pytest.mark.parametrize("kind", ["random", "ties", "constant", "signed zeros", "descending"])
def test_topk_is_a_stable_sort_around_every_boundary(k, kind):
    generator = torch.Generator().manual_seed(3)
    width = 2 * k + 70
    lengths = {0, 1, k - 1, k, k + 1, 2 * k - 1, 2 * k, 2 * k + 1, 63, 64, 65, width}
    length = torch.tensor(sorted(n for n in lengths if n <= width)).int()
    rows = length.shape[0]
    logits = {
        "random": torch.randn(rows, width, generator=generator),
        "ties": torch.randint(-2, 3, (rows, width), generator=generator).float(),
        "constant": torch.zeros(rows, width),
        "signed zeros": torch.zeros(rows, width) * torch.randn(rows, width, generator=generator),
        "descending": -torch.arange(width).float().expand(rows, width),
    }[kind]
    logits = logits.masked_fill(torch.arange(width) >= length[:, None], -torch.inf)
    pages = torch.randperm(-(-width // KEYS) + 5, generator=generator)[: -(-width // KEYS)]
    page_table = pages.int()[None]
    top = index_topk(logits, length, page_table, torch.zeros(rows).int(), k)
    assert top.slot.shape == top.logical.shape == (rows, k)
    assert top.length.tolist() == [min(n, k) for n in length.tolist()]
    assert chosen(top) == stable_topk(logits, length, k)
    expected = pages[top.logical.clamp(min=0) // KEYS] * KEYS + top.logical.clamp(min=0) % KEYS
    assert torch.equal(top.slot, expected.masked_fill(top.logical < 0, -1).int())


def test_nan_scores_are_chosen_last_and_disturb_no_other_row():
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(5))
    length = torch.tensor([200, 150, 200]).int()
    logits[1, 150:] = -torch.inf
    rest = (length, torch.arange(4)[None].int(), torch.zeros(3).int(), 16)
    clean = index_topk(logits, *rest)
    logits[0] = torch.nan
    logits[1, 7:] = torch.nan
    top = index_topk(logits, *rest)
    assert chosen(top)[:2] == [list(range(16))] * 2  # of equals, the lowest entries
    assert chosen(top)[2] == chosen(clean)[2]
    assert top.length.tolist() == [16] * 3


def test_a_nan_query_disturbs_no_other_request():
    case = problem(4, torch.tensor([300, 300, 300, 300]).int())
    clean = index_select(*case, 320, 16)
    case[0].weight[1] = torch.nan
    top = index_select(*case, 320, 16)
    others = torch.tensor([0, 2, 3])
    for got, want in zip(top, clean, strict=True):
        assert torch.equal(got[others], want[others])
    assert chosen(top)[1] == list(range(16))


def problem(rows: int, length: torch.Tensor, heads: int = 16, seed: int = 4, integer: bool = False):
    """One request, random or (integer: many exact ties) keys, longest length first."""
    generator = torch.Generator().manual_seed(seed)
    longest = int(length.max())
    keys = torch.randn(longest, 128, generator=generator)
    if integer:
        keys = keys[torch.randint(0, 4, (longest,), generator=generator)]
    count = -(-longest // KEYS)
    pool, row = paged(keys, torch.randperm(count + 3, generator=generator)[:count].tolist())
    query = index_q(
        torch.randn(rows, heads, 128, generator=generator).bfloat16(),
        torch.randn(rows, heads, generator=generator).bfloat16(),
        table(), torch.arange(rows) % 64,
    )  # fmt: skip
    return query, pool, row[None], torch.zeros(rows).int(), length.int()


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("around", [15, 16, 17, 32, 64])
def test_decode_and_verify_select_the_same_set(around, integer):
    length = torch.arange(around, around + 6)
    query, pool, page_table, row_req, length = problem(6, length, integer=integer)
    whole = index_select(query, pool, page_table, row_req, length, 128, 16)
    for t in range(6):
        one = slice(t, t + 1)
        alone = index_select(
            type(query)(query.q[one], query.weight[one]), pool, page_table, row_req[one],
            length[one], 128, 16,
        )  # fmt: skip
        for field, value in zip(alone._fields, alone, strict=True):
            assert torch.equal(value, getattr(whole, field)[one]), field


@pytest.mark.parametrize("length", [[3, 9, 16], [15, 17, 40], [16, 16, 16]])
def test_select_equals_logits_then_topk(length):
    query, pool, page_table, row_req, length = problem(3, torch.tensor(length))
    logits = index_logits(query, pool, page_table, row_req, length, 64)
    whole = index_topk(logits, length, page_table, row_req, 16)
    select = index_select(query, pool, page_table, row_req, length, 64, 16)
    assert all(torch.equal(a, b) for a, b in zip(whole, select, strict=True))


def test_rows_do_not_depend_on_their_batch():
    generator = torch.Generator().manual_seed(5)
    length = torch.randint(1, 300, (48,), generator=generator)
    query, pool, page_table, row_req, length = problem(48, length)
    order = torch.randperm(48, generator=generator)

    def run(rows):
        some = type(query)(query.q[rows], query.weight[rows])
        return index_logits(some, pool, page_table, row_req[rows], length[rows], 300)

    whole = run(torch.arange(48))
    for rows in [*order[:8].split(1), order[:6], order]:
        assert torch.equal(run(rows), whole[rows])


class LargestTensor(TorchDispatchMode):
    """Records the largest storage any op allocates."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {
            x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, torch.Tensor)
        }
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in inputs:
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("heads", [16, 200])
def test_selection_stays_within_its_workspace(monkeypatch, heads):
    """Small chunks of rows and keys choose what one big chunk chooses, in bounded memory."""
    length = torch.randint(1, 3000, (40,), generator=torch.Generator().manual_seed(6))
    query, pool, page_table, row_req, length = problem(40, length, heads)
    whole = index_select(query, pool, page_table, row_req, length, 3000, 16)
    budget = 256 << 10
    monkeypatch.setattr(indexer_reference, "WORKSPACE_BYTES", budget)
    with LargestTensor() as largest:
        small = index_select(query, pool, page_table, row_req, length, 3000, 16)
    assert largest.nbytes <= budget
    assert all(torch.equal(a, b) for a, b in zip(whole, small, strict=True))


def test_no_rows():
    query, pool, page_table, row_req, length = problem(1, torch.tensor([5]))
    none = type(query)(query.q[:0], query.weight[:0])
    logits = index_logits(none, pool, page_table, row_req[:0], length[:0], 64)
    assert logits.shape == (0, 64)
    assert index_topk(logits, length[:0], page_table, row_req[:0], 16).slot.shape == (0, 16)
    select = index_select(none, pool, page_table, row_req[:0], length[:0], 64, 16)
    assert select.slot.shape == (0, 16)


def test_errors():
    query, pool, page_table, row_req, length = problem(2, torch.tensor([5, 6]))
    with pytest.raises(ValueError, match="k >= 1"):
        index_select(query, pool, page_table, row_req, length, 64, 0)
    with pytest.raises(ValueError, match=r"shape \[2\]"):
        index_logits(query, pool, page_table, row_req[:1], length, 64)
    with pytest.raises(ValueError, match="index_q needs"):
        index_q(torch.zeros(2, 4, 64), torch.zeros(2, 4), table(), torch.zeros(2).long())
