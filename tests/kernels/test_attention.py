"""Sparse attention against dense fp64 softmax, at every list width and head count."""

import pytest
import torch
from kv_cases import filled_pool, rope_table, slot_lists

from dspark.kernels.attention import SlotList, mla_sparse
from dspark.kernels.attention.reference import runs
from dspark.kernels.common.kv_pages import load_slots, page_stride
from dspark.kernels.qkv import inv_rope

SCALE = 512**-0.5


def dense(q, pools, sink):
    """fp64 softmax per row; `pools` is a list of (pool, per_page, idx, length)."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        keys = torch.cat([load_slots(p, n, idx[t, : length[t]]) for p, n, idx, length in pools])
        logits = torch.cat([q[t].double() @ keys.T * SCALE, sink.double()[:, None]], 1)
        out[t] = logits.softmax(1)[:, :-1] @ keys
    return out


@pytest.mark.parametrize("width", [1, 63, 64, 65, 128, 133, 192, 256, 646])
def test_every_list_width(width):
    torch.manual_seed(width)
    pool = filled_pool(700, 256, 1)
    idx, length = slot_lists(3, width, 700, 256, 2)
    q, sink = torch.randn(3, 8, 512).bfloat16(), torch.randn(8)
    pos = torch.tensor([5, 9, 33])
    out = mla_sparse(q, SlotList(pool, 256, idx, length), None, sink, SCALE, rope_table(), pos)
    expected = inv_rope(dense(q, [(pool, 256, idx, length)], sink).float(), rope_table(), pos)
    assert torch.equal(out, expected.bfloat16())


@pytest.mark.parametrize("heads", [4, 8, 16, 32, 64])
def test_window_and_compressed_lists(heads):
    torch.manual_seed(heads)
    window, entries = filled_pool(300, 256, 3), filled_pool(200, 64, 4)
    idx, length = slot_lists(5, 128, 300, 256, 5)
    x_idx, x_len = slot_lists(5, 40, 200, 64, 6)
    q, sink, pos = torch.randn(5, heads, 512), torch.randn(heads), torch.arange(5)
    lists = [SlotList(window, 256, idx, length), SlotList(entries, 64, x_idx, x_len)]
    out = mla_sparse(q, *lists, sink, SCALE, None, pos)
    expected = dense(q, lists, sink)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)


def test_two_keys_by_hand():
    """Keys e0 and e1, q = 0: both weigh 1, the sink weighs e^ln2 = 2, so each value gets 1/4."""
    pool = torch.zeros(1, 2 * 512)
    pool[0, 0], pool[0, 512 + 1] = 1.0, 1.0
    out = mla_sparse(
        torch.zeros(1, 1, 512),
        SlotList(pool, 2, torch.tensor([[0, 1]]).int(), torch.tensor([2]).int()),
        None, torch.tensor([2.0]).log(), SCALE, None, torch.zeros(1).long(),
    )  # fmt: skip
    expected = torch.zeros(512)
    expected[:2] = 0.25
    torch.testing.assert_close(out[0, 0], expected)


def test_empty_lists_give_zero_and_read_nothing():
    pool = torch.full((2, page_stride(64)), 255, dtype=torch.uint8)
    none = torch.full((2, 5), -1, dtype=torch.int32)
    zero, pos = torch.zeros(2).int(), torch.zeros(2).long()
    q = torch.randn(2, 8, 512).bfloat16()
    q[1] = torch.nan  # a padded row may hold anything
    empty = SlotList(pool, 64, none, zero)
    for extra in (None, empty):
        out = mla_sparse(q, empty, extra, torch.zeros(8), SCALE, rope_table(), pos)
        assert torch.equal(out, torch.zeros_like(out))


def test_slots_past_the_length_and_minus_one_holes_are_skipped():
    torch.manual_seed(7)
    pool = filled_pool(30, 64, 8)
    q, sink, pos = torch.randn(1, 8, 512).bfloat16(), torch.randn(8), torch.zeros(1).long()

    def run(idx, length):
        return mla_sparse(
            q, SlotList(pool, 64, torch.tensor([idx]).int(), torch.tensor([length]).int()),
            None, sink, SCALE, None, pos,
        )  # fmt: skip

    plain = run([64, 70, 80], 3)
    assert torch.equal(run([64, -1, 70, 80], 4), plain)
    assert torch.equal(run([64, 70, 80, 3, 0], 3), plain)  # 3 and 0 lie on the NaN page


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_do_not_depend_on_their_batch(dtype):
    torch.manual_seed(9)
    window, entries = filled_pool(300, 256, 10), filled_pool(200, 64, 11)
    idx, length = slot_lists(48, 128, 300, 256, 12)
    lists = [SlotList(window, 256, idx, length)]
    lists.append(SlotList(entries, 64, *slot_lists(48, 16, 200, 64, 13)))
    q, sink, pos = torch.randn(48, 8, 512).to(dtype), torch.randn(8), torch.arange(48)

    def run(rows):
        return mla_sparse(
            q[rows], lists[0].rows(rows), lists[1].rows(rows), sink, SCALE, rope_table(), pos[rows],
        )  # fmt: skip

    whole, order = run(torch.arange(48)), torch.randperm(48)
    for rows in [*order[:8].split(1), order[:6], order]:
        assert torch.equal(run(rows), whole[rows])


def test_heads_do_not_see_each_other():
    """Heads of one rank, and NaN in heads that only pad, leave the others bit for bit alone."""
    torch.manual_seed(14)
    pool = filled_pool(200, 256, 15)
    idx, length = slot_lists(4, 128, 200, 256, 16)
    q, sink, pos = torch.randn(4, 16, 512).bfloat16(), torch.randn(16), torch.arange(4)

    def run(q, sink):
        return mla_sparse(q, SlotList(pool, 256, idx, length), None, sink, SCALE, rope_table(), pos)

    whole = run(q, sink)
    shards = [run(q[:, h : h + 4], sink[h : h + 4]) for h in range(0, 16, 4)]
    assert torch.equal(torch.cat(shards, 1), whole)
    padded = q.clone()
    padded[:, 8:] = torch.nan
    assert torch.equal(run(padded, sink)[:, :8], whole[:, :8])


def test_long_prefill_equals_row_by_row():
    torch.manual_seed(17)
    pool = filled_pool(300, 256, 18)
    idx, length = slot_lists(200, 128, 300, 256, 19)
    q, sink, pos = torch.randn(200, 4, 512).bfloat16(), torch.randn(4), torch.arange(200) % 64

    def run(rows):
        return mla_sparse(
            q[rows], SlotList(pool, 256, idx, length).rows(rows), None, sink, SCALE,
            rope_table(), pos[rows],
        )  # fmt: skip

    whole = run(torch.arange(200))
    for t in (0, 63, 64, 199):
        assert torch.equal(run(torch.tensor([t])), whole[t : t + 1])


def test_errors_name_the_shapes():
    q, pos = torch.zeros(2, 8, 512), torch.zeros(2).long()
    idx, length, pool = torch.zeros(2, 1).int(), torch.zeros(2).int(), torch.zeros(1, 1024)
    listed = SlotList(pool, 2, idx, length)
    with pytest.raises(ValueError, match=r"sink \[H\]"):
        mla_sparse(q, listed, None, torch.zeros(4), 1.0, None, pos)
    short = listed._replace(length=length[:1])
    with pytest.raises(ValueError, match=r"window list must cover 2 rows"):
        mla_sparse(q, short, None, torch.zeros(8), 1.0, None, pos)
    with pytest.raises(ValueError, match=r"compressed list must cover 2 rows"):
        mla_sparse(q, listed, short, torch.zeros(8), 1.0, None, pos)


def sliding_rows(rows, width, first):
    """Window lists as consecutive rows of one request have them: each drops and adds one slot."""
    idx = torch.arange(first, first + rows)[:, None] + torch.arange(width)
    return idx.int(), torch.full((rows,), width, dtype=torch.int32)


def test_rows_that_share_keys_have_the_bits_of_rows_alone():
    """Two requests, the first of more rows than share one set of keys, and a padded row."""
    torch.manual_seed(11)
    window, entries = filled_pool(300, 256, 12), filled_pool(200, 64, 13)
    first, second = sliding_rows(40, 128, 256), sliding_rows(6, 128, 386)
    idx = torch.cat([first[0], second[0], torch.full((1, 128), -1).int()])
    length = torch.cat([first[1], second[1], torch.zeros(1).int()])
    lists = [SlotList(window, 256, idx, length)]
    lists.append(SlotList(entries, 64, *slot_lists(47, 40, 200, 64, 14)))
    q, sink, pos = torch.randn(47, 8, 512).bfloat16(), torch.randn(8), torch.arange(47)

    def run(rows):
        return mla_sparse(
            q[rows], lists[0].rows(rows), lists[1].rows(rows), sink, SCALE, rope_table(), pos[rows],
        )  # fmt: skip

    together = run(slice(0, 47))
    assert torch.equal(together, torch.cat([run(slice(r, r + 1)) for r in range(47)]))
    expected = inv_rope(dense(q, lists, sink).float(), rope_table(), pos)
    assert torch.equal(together, expected.bfloat16())


def test_a_broken_key_stays_with_the_rows_that_see_it():
    pool = filled_pool(300, 256, 15)
    idx, length = sliding_rows(6, 128, 256)
    q, sink, pos = torch.randn(6, 8, 512).bfloat16(), torch.randn(8), torch.arange(6)

    def run():
        return mla_sparse(
            q, SlotList(pool, 256, idx, length), None, sink, SCALE, None, pos
        )  # fmt: skip

    before = run()
    pool[1, 576 * 130 : 576 * 131] = 255  # e4m3 NaN in slot 256 + 130, which rows 3 to 5 see
    after = run()
    assert torch.equal(after[:3], before[:3])
    assert after[3:].isnan().any(-1).all()


def test_runs_end_with_the_request_and_at_their_longest():
    """40 rows of one request, one of another, two padded ones."""
    slots, length = sliding_rows(40, 4, 0)
    other = torch.tensor([[90, 91, 92, -1], [-1, -1, -1, -1], [-1, -1, -1, -1]]).int()
    slots, length = torch.cat([slots, other]), torch.cat([length, torch.tensor([3, 0, 0]).int()])
    assert runs(slots, length) == [slice(a, b) for a, b in ((0, 32), (32, 40), (40, 43))]
    after = torch.cat([slots, slots[:1]]), torch.cat([length, length[:1]])
    assert runs(*after)[-1] == slice(43, 44)  # nothing is shared with a padded row
    assert runs(slots[:1], length[:1]) == [slice(0, 1)]
    assert runs(slots[:0], length[:0]) == []
