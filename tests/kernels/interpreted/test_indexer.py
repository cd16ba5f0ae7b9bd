"""Indexer kernels under the interpreter against the references."""

import pytest
import torch
from kv_cases import fp8_steps, index_case, rope_table

from dspark.kernels.indexer import (
    index_logits,
    index_q,
    index_select,
    index_topk,
    kernel,
    reference,
)


def test_index_q_matches_the_reference():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 18, 128, generator=generator).bfloat16()
    w, pos = torch.randn(3, 18, generator=generator).bfloat16(), torch.tensor([0, 5, 63])
    got, want = (f(q, w, rope_table(), pos) for f in (index_q, reference.index_q))
    steps = fp8_steps(got.q, want.q)
    assert steps.max() <= 1
    assert (steps > 0).float().mean() <= 1e-3
    torch.testing.assert_close(got.weight, want.weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("row_req", "c4_len"),
    [
        ([0], [1]),
        ([0, 0, 1, -1, 1], [130, 65, 70, 0, 0]),
        ([0] * 9 + [1], [60, 61, 62, 63, 64, 65, 66, 67, 68, 3]),  # runs cross a multiple of 8
    ],
)
def test_logits_match_the_reference(row_req, c4_len):
    case = index_case(row_req, c4_len, heads=18)
    got, want = (f(*case, 192) for f in (index_logits, reference.index_logits))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [1, 16, 64])
@pytest.mark.parametrize("kind", ["random", "ties", "signed zeros"])
def test_topk_is_exact_around_every_boundary(k, kind, monkeypatch):
    monkeypatch.setitem(kernel.LAUNCH, "topk", kernel.LAUNCH["topk"]._replace(
        constexprs={"BLOCK": 128}))  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    width = 2 * k + 440  # three levels
    length = torch.tensor([0, k - 1, k, k + 1, 2 * k, width]).int()
    logits = torch.randn(6, width, generator=generator)
    if kind == "ties":
        logits = logits.round()
    if kind == "signed zeros":
        logits *= 0
    logits = logits.masked_fill(torch.arange(width) >= length[:, None], torch.nan)
    page_table = torch.randperm(12, generator=generator).int()[None]
    arguments = (length, page_table, torch.zeros(6).int(), k)
    got = index_topk(logits, *arguments)
    want = reference.index_topk(logits.nan_to_num(-torch.inf), *arguments)
    for name in got._fields:
        assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_nan_scores_are_chosen_last(monkeypatch):
    monkeypatch.setitem(kernel.LAUNCH, "topk", kernel.LAUNCH["topk"]._replace(
        constexprs={"BLOCK": 128}))  # fmt: skip
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(2))
    logits[0] = torch.nan
    logits[1, 10:] = torch.nan
    logits[2, ::3] = -torch.nan
    length = torch.full((4,), 200).int()
    arguments = (length, torch.arange(4)[None].int(), torch.zeros(4).int(), 16)
    got, want = (f.index_topk(logits, *arguments) for f in (kernel, reference))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_decode_and_verify_select_the_same_set():
    case = index_case([0] * 6, list(range(62, 68)), distinct=5)
    whole = index_select(*case, 128, 64)
    for t in range(6):
        alone = index_select(*case.rows(torch.tensor([t])), 128, 64)
        for name in whole._fields:
            assert torch.equal(getattr(alone, name)[0], getattr(whole, name)[t]), name


def test_prefill_chunks_select_the_same_set(monkeypatch):
    case = index_case([0] * 5 + [-1], [70, 20, 71, 90, 5, 0])
    whole = index_select(*case, 90, 16)
    monkeypatch.setattr(kernel, "LOGITS_BYTES", 2 * 90 * 4)
    chunked = index_select(*case, 90, 16)
    assert all(torch.equal(a, b) for a, b in zip(whole, chunked, strict=True))
