"""Hyper-connections on a GPU at the model's width, against the fp64 reference on the CPU."""

import pytest
import torch
from weight_cases import (
    assert_close,
    assert_rows_invariant,
    generator,
    hyper_site,
    random_rows,
    random_streams,
)

from dspark.kernels.hyper import (
    HyperNumbers,
    HyperSite,
    mhc_head,
    mhc_post,
    mhc_post_pre,
    mhc_pre,
    prepare_hyper,
    reference,
    stream_mean,
)

pytestmark = pytest.mark.gpu

NUMBERS, HIDDEN = HyperNumbers(1e-6, 1e-6, 20), 4096


class Site:
    """One site on the CPU and on the device."""

    def __init__(self, device, outputs=24):
        w, scale, base = hyper_site(HIDDEN, outputs)
        self.on_cpu = HyperSite(w, scale, base)
        self.on_gpu = HyperSite(prepare_hyper(w.fn.to(device)), scale.to(device), base.to(device))


@pytest.mark.parametrize("rows", [1, 6, 48, 64, 70])
def test_pre(device, rows):
    site, x = Site(device), random_streams(rows, HIDDEN)
    norm_w = random_rows(HIDDEN, seed=5)
    got = mhc_pre(x.to(device), site.on_gpu, norm_w.to(device), NUMBERS)
    want = reference.mhc_pre(x, site.on_cpu, norm_w, NUMBERS)
    assert_close(got.post, want.post, 2e-6)
    assert_close(got.comb, want.comb, 2e-6)
    assert_close(got.y, want.y)


@pytest.mark.parametrize("rows", [1, 6, 48, 70])
def test_post_and_next_pre_in_one(device, rows):
    site, x = Site(device), random_streams(rows, HIDDEN)
    f, norm_w = random_rows(rows, HIDDEN, seed=6), random_rows(HIDDEN, seed=5)
    g = generator(3)
    post, comb = torch.rand(rows, 4, generator=g), torch.rand(rows, 4, 4, generator=g)
    parts = [t.to(device) for t in (f, x, post, comb)]
    streams, pre = mhc_post_pre(*parts, site.on_gpu, norm_w.to(device), NUMBERS)
    assert_close(streams, reference.mhc_post(f, x, post, comb))
    want = mhc_pre(streams, site.on_gpu, norm_w.to(device), NUMBERS)
    for a, b in zip(pre, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rows", [1, 48])
def test_post_head_and_mean(device, rows):
    x, f = random_streams(rows, HIDDEN), random_rows(rows, HIDDEN, seed=6)
    g = generator(3)
    post, comb = torch.rand(rows, 4, generator=g), torch.rand(rows, 4, 4, generator=g)
    got = mhc_post(*(t.to(device) for t in (f, x, post, comb)))
    assert_close(got, reference.mhc_post(f, x, post, comb))
    site = Site(device, outputs=4)
    got = mhc_head(x.to(device), site.on_gpu, NUMBERS)
    assert_close(got, reference.mhc_head(x, site.on_cpu, NUMBERS))
    assert torch.equal(stream_mean(x.to(device)).cpu(), reference.stream_mean(x))


def test_rows_do_not_depend_on_their_batch(device):
    site, x = Site(device), random_streams(100, HIDDEN).to(device)
    norm_w = random_rows(HIDDEN, seed=5).to(device)
    f = x[:, 2].contiguous()

    def run(index):
        rows = x[index.to(device)]
        pre = mhc_pre(rows, site.on_gpu, norm_w, NUMBERS)
        back = (f[index.to(device)], rows, pre.post, pre.comb)
        after, second = mhc_post_pre(*back, site.on_gpu, norm_w, NUMBERS)
        parts = (*pre, *second, after, mhc_post(*back))
        return torch.cat([part.float().flatten(1) for part in parts], 1).cpu()

    whole = assert_rows_invariant(run, 100)
    assert torch.equal(run(torch.arange(64)), whole[:64])
    assert torch.equal(run(torch.arange(65)), whole[:65])


@pytest.mark.parametrize("hidden", [192, HIDDEN])
def test_rows_do_not_depend_on_their_place_in_a_tile(device, hidden):
    """A compiler may fuse another product of a sum in each copy of an unrolled loop."""
    fn, scale, base = hyper_site(hidden)
    site = HyperSite(prepare_hyper(fn.fn.to(device)), scale.to(device), base.to(device))
    x, norm_w = random_streams(1640, hidden).to(device), random_rows(hidden).to(device)
    f = random_rows(1640, hidden, seed=2).to(device)

    def run(first, last):
        rows = x[first:last]
        pre = mhc_pre(rows, site, norm_w, NUMBERS)
        after, _ = mhc_post_pre(f[first:last], rows, pre.post, pre.comb, site, norm_w, NUMBERS)
        return after, *pre

    whole = run(0, 1640)
    for first, last in ((1, 1640), (7, 107), (300, 420), (1001, 1033)):
        for got, want in zip(run(first, last), whole, strict=True):
            assert torch.equal(got, want[first:last])


def test_nan_stays_in_its_row(device):
    site, x = Site(device), random_streams(6, HIDDEN).to(device)
    norm_w = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    clean = mhc_pre(x, site.on_gpu, norm_w, NUMBERS)
    x[2, 1, 9] = float("nan")
    got = mhc_pre(x, site.on_gpu, norm_w, NUMBERS)
    keep = torch.arange(6) != 2
    for a, b in zip(got, clean, strict=True):
        assert torch.equal(a[keep], b[keep])
