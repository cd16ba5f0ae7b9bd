"""Hyper-connection kernels under the interpreter against their references."""

import pytest
import torch
from weight_cases import generator, hyper_site, random_streams

from dspark.kernels.hyper import HyperNumbers, HyperSite, kernel, reference

NUMBERS = HyperNumbers(1e-6, 1e-6, 20)


@pytest.mark.parametrize(("rows", "hidden"), [(1, 128), (5, 96)])
def test_pre(rows, hidden):
    x, (w, scale, base) = random_streams(rows, hidden), hyper_site(hidden)
    norm_w = torch.rand(hidden, generator=generator(3)).add(0.5).bfloat16()
    got = kernel.mhc_pre(x, HyperSite(w, scale, base), norm_w, NUMBERS)
    want = reference.mhc_pre(x, HyperSite(w, scale, base), norm_w, NUMBERS)
    torch.testing.assert_close(got.post, want.post, rtol=5e-6, atol=1e-6)
    torch.testing.assert_close(got.comb, want.comb, rtol=5e-6, atol=1e-6)
    torch.testing.assert_close(got.y, want.y, rtol=2**-7, atol=1e-3)


def test_post():
    x, f = random_streams(2, 96), random_streams(2, 96, seed=2)[:, 0].contiguous()
    g = generator(3)
    post, comb = torch.rand(2, 4, generator=g), torch.rand(2, 4, 4, generator=g)
    got = kernel.mhc_post(f, x, post, comb)
    torch.testing.assert_close(got, reference.mhc_post(f, x, post, comb), rtol=2**-7, atol=1e-3)


def test_post_and_next_pre_in_one():
    x, f = random_streams(5, 96), random_streams(5, 96, seed=2)[:, 0].contiguous()
    w, scale, base = hyper_site(96)
    g = generator(3)
    post, comb = torch.rand(5, 4, generator=g), torch.rand(5, 4, 4, generator=g)
    site = (HyperSite(w, scale, base), torch.ones(96).bfloat16(), NUMBERS)
    streams, pre = kernel.mhc_post_pre(f, x, post, comb, *site)
    assert torch.equal(streams, kernel.mhc_post(f, x, post, comb))
    for got, want in zip(pre, kernel.mhc_pre(streams, *site), strict=True):
        assert torch.equal(got, want)


def test_head_and_mean():
    x, (w, scale, base) = random_streams(3, 128), hyper_site(128, outputs=4)
    got = kernel.mhc_head(x, HyperSite(w, scale, base), NUMBERS)
    want = reference.mhc_head(x, HyperSite(w, scale, base), NUMBERS)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)
    assert torch.equal(kernel.stream_mean(x), reference.stream_mean(x))


def test_rows_do_not_depend_on_their_batch():
    x, (w, scale, base) = random_streams(5, 128), hyper_site(128)
    norm_w = torch.ones(128).bfloat16()
    whole = kernel.mhc_pre(x, HyperSite(w, scale, base), norm_w, NUMBERS)
    alone = kernel.mhc_pre(x[3:4], HyperSite(w, scale, base), norm_w, NUMBERS)
    for a, b in zip(alone, whole, strict=True):
        assert torch.equal(a, b[3:4])


def test_nan_stays_in_its_row():
    x, (w, scale, base) = random_streams(3, 128), hyper_site(128)
    norm_w = torch.ones(128).bfloat16()
    clean = kernel.mhc_pre(x, HyperSite(w, scale, base), norm_w, NUMBERS)
    x[1, 2, 3] = float("nan")
    got = kernel.mhc_pre(x, HyperSite(w, scale, base), norm_w, NUMBERS)
    for a, b in zip(got, clean, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])
    assert got.y[1].isnan().all()


def test_no_rows():
    x, (w, scale, base) = random_streams(0, 128), hyper_site(128)
    got = kernel.mhc_pre(x, HyperSite(w, scale, base), torch.ones(128), NUMBERS)
    assert got.comb.shape == (0, 4, 4)
    assert kernel.mhc_post(x[:, 0], x, got.post, got.comb).shape == (0, 4, 128)
    assert kernel.stream_mean(x).shape == (0, 128)
