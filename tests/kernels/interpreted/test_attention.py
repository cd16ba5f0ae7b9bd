"""Sparse attention kernels under the interpreter against the fp64 reference."""

import pytest
import torch
from kv_cases import assert_close, attention_case

from dspark.kernels.attention import kernel


@pytest.fixture(params=["decode", "short prefill", "long prefill"])
def path(request, monkeypatch):
    """Every plan, whatever the number of rows."""
    monkeypatch.setattr(kernel, "DECODE_ROWS", 64 if request.param == "decode" else 0)
    if request.param == "long prefill":
        monkeypatch.setattr(kernel, "REPEATED_SLOTS", 0)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 133])
def test_window_widths(path, width):
    case = attention_case(2, 8, width, seed=width)
    assert_close(case.run(), case.reference())


@pytest.mark.parametrize(("heads", "entries", "per_page"), [(4, 40, 64), (8, 66, 64), (18, 5, 2)])
def test_heads_and_compressed_entries(path, heads, entries, per_page):
    case = attention_case(2, heads, 30, entries, per_page, seed=heads)
    assert_close(case.run(), case.reference())


def test_without_inverse_rope(path):
    case = attention_case(2, 4, 30, 5)._replace(cos_sin=None)
    assert_close(case.run(), case.reference())


def test_empty_lists_give_zero_and_read_nothing(path):
    case = attention_case(3, 4, 5, 5)
    case.window.pool.fill_(255)  # NaN
    case.compressed.pool.fill_(255)
    case.window.length.zero_()
    case.compressed.length.zero_()
    assert torch.equal(case.run(), torch.zeros_like(case.q))


def test_minus_one_inside_a_list_is_skipped(path):
    case = attention_case(1, 4, 8)
    listed = case.window
    short = case._replace(window=listed._replace(idx=listed.idx[:, :7], length=listed.length - 1))
    holed = case._replace(window=listed._replace(idx=listed.idx.clone()))
    holed.window.idx[0, 7] = -1
    assert torch.equal(holed.run(), short.run())


def test_rows_do_not_depend_on_their_batch():
    case = attention_case(6, 4, 70, 20, seed=3)
    whole = case.run()
    order = torch.tensor([4, 0, 5])
    assert torch.equal(case.rows(order).run(), whole[order])
    assert torch.equal(case.rows(torch.tensor([2])).run(), whole[2:3])


def test_many_requests_of_few_rows_have_the_bits_of_each_alone(monkeypatch):
    """More rows than one launch takes: still no prefill, which would wait for the device."""
    monkeypatch.setattr(kernel, "DECODE_ROWS", 2)
    monkeypatch.setattr(kernel, "_run_prefill", None)
    case = attention_case(5, 4, 70, 20, seed=6)
    whole = case.run(running=True)
    for row in torch.arange(5).split(1):
        assert torch.equal(case.rows(row).run(running=True), whole[row])


def test_short_prompts_have_the_bits_of_long_ones(monkeypatch):
    """A prompt of few rows, such as what the prefix cache leaves over, is a prompt all the same."""
    monkeypatch.setattr(kernel, "_run_decode", None)
    case = attention_case(3, 4, 70, 20, seed=7)
    with monkeypatch.context() as long:
        long.setattr(kernel, "REPEATED_SLOTS", 0)
        whole = case.run(running=False)
    for row in torch.arange(3).split(1):
        assert torch.equal(case.rows(row).run(running=False), whole[row])


def test_short_prompts_never_wait_for_the_device(monkeypatch):
    monkeypatch.setattr(kernel, "_renumber", None)
    case = attention_case(3, 4, 70, 20, seed=7)
    assert_close(case.run(running=False), case.reference())


def test_list_width_does_not_change_bits():
    """A graph captured for a longer context pads every list."""
    case = attention_case(2, 4, 20, 70, seed=4)
    pad = torch.full((2, 1200), -1, dtype=torch.int32)
    listed = case.compressed
    wider = case._replace(compressed=listed._replace(idx=torch.cat([listed.idx, pad], 1)))
    assert torch.equal(wider.run(), case.run())


def test_head_count_does_not_change_bits():
    """Four heads alone, or inside a rank of eighteen."""
    case = attention_case(1, 18, 40, 5, seed=5)
    whole = case.run()
    some = case._replace(q=case.q[:, 14:18], sink=case.sink[14:18])
    assert torch.equal(some.run(), whole[:, 14:18])


def test_no_rows(path):
    case = attention_case(1, 4, 5)
    none = torch.empty(0, dtype=torch.int64)
    assert case.rows(none).run().shape == (0, 4, 512)
