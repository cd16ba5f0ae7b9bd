"""Hyper-connection references against a literal transcription of the published loop."""

import pytest
import torch
from weight_cases import assert_rows_invariant, generator, hyper_site, random_rows, random_streams

from dspark.kernels.hyper import (
    HyperNumbers,
    HyperSite,
    mhc_head,
    mhc_post,
    mhc_post_pre,
    mhc_pre,
    prepare_hyper,
    stream_mean,
)
from dspark.kernels.hyper.reference import sinkhorn

NUMBERS = EPS_NORM, EPS_HC, ITERS = HyperNumbers(1e-6, 1e-6, 20)


def literal_sinkhorn(logits, eps, iters):
    a = torch.softmax(logits, -1) + eps
    a = a / (a.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        a = a / (a.sum(-1, keepdim=True) + eps)
        a = a / (a.sum(-2, keepdim=True) + eps)
    return a


def literal_pre(x, w, scale, base):
    """Streams f32 [T, 4, Hd] -> unnormalised mix, post and comb, all f64."""
    flat = x.double().flatten(1)
    z = flat @ w.fn.double().t() * torch.rsqrt(flat.square().mean(1, keepdim=True) + EPS_NORM)
    scale, base = scale.double(), base.double()
    pre = torch.sigmoid(z[:, :4] * scale[0] + base[:4]) + EPS_HC
    post = 2 * torch.sigmoid(z[:, 4:8] * scale[1] + base[4:8])
    logits = (z[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4)
    mix = (pre.unsqueeze(-1) * x.double()).sum(1)
    return mix, post, literal_sinkhorn(logits, EPS_HC, ITERS)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_sinkhorn_equals_the_literal_loop(eps):
    logits = torch.randn(9, 4, 4, dtype=torch.float64, generator=generator(2))
    logits = logits * 4
    for iters in (1, 2, 20):
        torch.testing.assert_close(
            sinkhorn(logits, eps, iters), literal_sinkhorn(logits, eps, iters), rtol=1e-12, atol=0
        )


def test_sinkhorn_ends_on_columns():
    logits = torch.randn(1, 4, 4, dtype=torch.float64, generator=generator(8)) * 6
    a = sinkhorn(logits, 1e-6, 2)
    torch.testing.assert_close(a.sum(1), torch.ones(1, 4).double(), atol=2e-6, rtol=0)
    assert (a.sum(2) - 1).abs().max() > 1e-4  # two iterations leave the rows visibly off


def test_pre_matches_the_formula_in_oracle_mode():
    x, (w, scale, base) = random_streams(5, 64, dtype=torch.float32), hyper_site(64)
    norm_w = torch.rand(64, generator=generator(3)) + 0.5
    got = mhc_pre(x, HyperSite(w, scale, base), norm_w, NUMBERS)
    mix, post, comb = literal_pre(x, w, scale, base)
    want = mix * torch.rsqrt(mix.square().mean(1, keepdim=True) + EPS_NORM) * norm_w.double()
    torch.testing.assert_close(got.y.double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.post, post.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(got.comb, comb.float(), rtol=1e-6, atol=0)


def test_pre_normalises_the_rounded_mix_when_served():
    x, (w, scale, base) = random_streams(5, 64), hyper_site(64)
    norm_w = torch.ones(64).bfloat16()
    got = mhc_pre(x, HyperSite(w, scale, base), norm_w, NUMBERS)
    mix = literal_pre(x, w, scale, base)[0].bfloat16().double()
    want = mix * torch.rsqrt(mix.square().mean(1, keepdim=True) + EPS_NORM)
    assert torch.equal(got.y, want.bfloat16())
    assert got.post.dtype == got.comb.dtype == torch.float32


def test_post_sums_over_the_first_index_of_comb():
    x = torch.zeros(1, 4, 2)
    x[0, 1] = torch.tensor([1.0, 10.0])
    comb = torch.zeros(1, 4, 4)
    comb[0, 1, 3] = 0.5  # old stream 1 into new stream 3
    post = torch.tensor([[1.0, 0.0, 0.0, 2.0]])
    f = torch.tensor([[7.0, 8.0]])
    got = mhc_post(f, x, post, comb)
    assert got[0].tolist() == [[7.0, 8.0], [0.0, 0.0], [0.0, 0.0], [14.5, 21.0]]


def test_post_and_next_pre_in_one():
    x, f, (w, scale, base) = random_streams(5, 64), random_rows(5, 64), hyper_site(64)
    g = generator(3)
    post, comb = torch.rand(5, 4, generator=g), torch.rand(5, 4, 4, generator=g)
    site = (HyperSite(w, scale, base), torch.ones(64), NUMBERS)
    streams, pre = mhc_post_pre(f, x, post, comb, *site)
    assert torch.equal(streams, mhc_post(f, x, post, comb))
    assert torch.equal(pre.y, mhc_pre(streams, *site).y)


def test_identity_site_keeps_the_streams():
    """A diagonal comb with post 0 carries the streams through unchanged."""
    x = random_streams(3, 32)
    comb = torch.eye(4).expand(3, 4, 4)
    assert torch.equal(mhc_post(random_rows(3, 32), x, torch.zeros(3, 4), comb), x)


def test_head_is_a_sigmoid_weighted_sum():
    x, (w, scale, base) = random_streams(4, 64, dtype=torch.float32), hyper_site(64, outputs=4)
    flat = x.double().flatten(1)
    z = flat @ w.fn.double().t() * torch.rsqrt(flat.square().mean(1, keepdim=True) + EPS_NORM)
    pre = torch.sigmoid(z * scale.double() + base.double()) + EPS_HC
    want = (pre.unsqueeze(-1) * x.double()).sum(1)
    got = mhc_head(x, HyperSite(w, scale, base), NUMBERS)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_stream_mean_rounds_once():
    x = torch.tensor([1.0, 2.0, 3.0, 2.0**-7]).view(1, 4, 1).bfloat16()
    assert stream_mean(x).item() == torch.tensor((6 + 2.0**-7) / 4).bfloat16().item()


def test_agrees_with_hf_deepseek_v4():
    """The same numbers through transformers' DeepseekV4 hyper-connection module."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(hidden_size=64, hc_mult=4, hc_sinkhorn_iters=ITERS)
    module = modeling.DeepseekV4HyperConnection(config)
    w, scale, base = hyper_site(64)
    with torch.no_grad():
        module.fn.copy_(w.fn)
        module.base.copy_(base)
        module.scale.copy_(scale)
        x = random_streams(5, 64, dtype=torch.float32)
        post, comb, mix = module(x.unsqueeze(0))
    got = mhc_pre(
        x, HyperSite(w, scale, base), torch.ones(64), NUMBERS._replace(eps_hc=config.hc_eps)
    )
    want = mix[0] * torch.rsqrt(mix[0].square().mean(1, keepdim=True) + EPS_NORM)
    torch.testing.assert_close(got.y, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.post, post[0].view(5, 4), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.comb, comb[0], rtol=1e-5, atol=1e-6)


def test_rows_are_batch_invariant():
    x, (w, scale, base) = random_streams(48, 64), hyper_site(64)
    norm_w = torch.ones(64).bfloat16()

    def pre(index):
        parts = mhc_pre(x[index], HyperSite(w, scale, base), norm_w, NUMBERS)
        return torch.cat([part.float().flatten(1) for part in parts], 1)

    assert_rows_invariant(pre, 48)
    got = mhc_pre(x, HyperSite(w, scale, base), norm_w, NUMBERS)
    f = x[:, 2].contiguous()
    assert_rows_invariant(lambda i: mhc_post(f[i], x[i], got.post[i], got.comb[i]), 48)


def test_row_chunks_and_nan_do_not_touch_other_rows():
    x, (w, scale, base) = random_streams(130, 64), hyper_site(64)
    norm_w = torch.ones(64).bfloat16()
    clean = mhc_pre(x, HyperSite(w, scale, base), norm_w, NUMBERS)
    x[129, 0, 0] = float("nan")
    got = mhc_pre(x, HyperSite(w, scale, base), norm_w, NUMBERS)
    for a, b in zip(clean, got, strict=True):
        assert torch.equal(a[:129], b[:129])
    assert got.y[129].isnan().all()


def test_no_rows():
    x, (w, scale, base) = random_streams(0, 64), hyper_site(64)
    got = mhc_pre(x, HyperSite(w, scale, base), torch.ones(64), NUMBERS)
    assert [tuple(part.shape) for part in got] == [(0, 64), (0, 4), (0, 4, 4)]
    assert mhc_post(x[:, 0], x, got.post, got.comb).shape == (0, 4, 64)
    assert stream_mean(x).shape == (0, 64)
    w4, scale4, base4 = hyper_site(64, outputs=4)
    assert mhc_head(x, HyperSite(w4, scale4, base4), NUMBERS).shape == (0, 64)


def test_bad_shapes_are_refused():
    w, scale, base = hyper_site(64)
    with pytest.raises(ValueError, match="does not fit streams"):
        mhc_pre(
            random_streams(2, 32),
            HyperSite(w, scale, base),
            torch.ones(32),
            NUMBERS,
        )
    with pytest.raises(ValueError, match="does not fit streams"):
        mhc_post(torch.zeros(2, 8), torch.zeros(2, 4, 16), torch.zeros(2, 4), torch.zeros(2, 4, 4))
    with pytest.raises(ValueError, match="hc fn must be f32"):
        prepare_hyper(torch.zeros(23, 64))
