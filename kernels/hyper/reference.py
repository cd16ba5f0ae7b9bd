"""Torch hyper-connections (mHC): four residual streams mixed by a doubly stochastic matrix."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from dspark.kernels.linear.reference import over_rows

STREAMS = 4
ROW_CHUNK = 128  # rows of 4 streams per fp64 temporary in prefill


# The 24 outputs are 4 pre, 4 post and 16 comb; each kind has its own scale.
SCALE_OF_OUTPUT = torch.tensor([0] * 4 + [1] * 4 + [2] * 16)


class HyperWeight(NamedTuple):
    """Mixing projection of one site; `dense` is its fp64 copy, kept on CPU."""

    fn: torch.Tensor  # f32 [24 or 4, 4*Hd]
    dense: torch.Tensor | None  # f64, same shape


class MhcPre(NamedTuple):
    """Sublayer input and the weights that put its output back into the streams."""

    y: torch.Tensor  # [T, Hd] normalised mix, dtype of the streams
    post: torch.Tensor  # f32 [T, 4] weight of the sublayer output per stream
    comb: torch.Tensor  # f32 [T, 4, 4]; entry [j, k] carries old stream j into new stream k


def mhc_pre(x, w, scale, base, norm_w, eps_norm, eps_hc, iters):
    scales = scale.double()[SCALE_OF_OUTPUT]
    bias, norm = base.double(), norm_w.double()

    def site(rows):
        streams = rows.double()
        mix = torch.addcmul(bias, _project(streams, w, eps_norm), scales)
        gates = torch.sigmoid(mix[:, : 2 * STREAMS])
        post = 2 * gates[:, STREAMS:]
        comb = sinkhorn(mix[:, 2 * STREAMS :].view(-1, STREAMS, STREAMS), eps_hc, iters)
        y = _weighted_sum(gates[:, :STREAMS] + eps_hc, streams).to(x.dtype)
        # The mean square is taken over the rounded mix, so a fused kernel can agree.
        y = F.rms_norm(y.double(), norm.shape, norm, eps_norm).to(x.dtype)
        return y, post.float(), comb.float()

    if x.shape[0] <= ROW_CHUNK:
        return MhcPre(*site(x))
    parts = [site(rows) for rows in x.split(ROW_CHUNK)]
    return MhcPre(*(torch.cat(part) for part in zip(*parts, strict=True)))


def mhc_post(f, x, post, comb):
    carried = torch.bmm(comb.double().transpose(1, 2), x.double())  # new stream k, old stream j
    return torch.addcmul(carried, post.double().unsqueeze(-1), f.double().unsqueeze(1)).to(x.dtype)


def mhc_post_pre(f, x, post, comb, w, scale, base, norm_w, eps_norm, eps_hc, iters):
    streams = mhc_post(f, x, post, comb)
    return streams, mhc_pre(streams, w, scale, base, norm_w, eps_norm, eps_hc, iters)


def mhc_head(x, w, scale, base, eps_norm, eps_hc):
    def head(rows):
        streams = rows.double()
        z = _project(streams, w, eps_norm)
        pre = torch.sigmoid(torch.addcmul(base.double(), z, scale.double())) + eps_hc
        return _weighted_sum(pre, streams).to(x.dtype)

    return over_rows(head, x)


def stream_mean(x):
    return x.double().mean(1).to(x.dtype)


def sinkhorn(logits: torch.Tensor, eps: float, iters: int) -> torch.Tensor:
    """[T, 4, 4] -> row softmax + eps, one column step, then iters-1 row and column steps.

    Every step divides by (sum + eps). Written as A = diag(1/r) K diag(1/c) with K fixed, a step
    is r <- K (1/c) + eps*r: the same numbers in two small ops instead of three large ones.
    """
    kernel = torch.softmax(logits, -1) + eps
    transposed = kernel.transpose(1, 2)
    r = torch.ones_like(kernel[:, :, :1])
    c, row_gain, column_gain = r.clone(), r.clone(), r.clone()
    for step in range(iters):
        if step:
            torch.reciprocal(torch.baddbmm(r, kernel, column_gain, beta=eps, out=r), out=row_gain)
        torch.reciprocal(torch.baddbmm(c, transposed, row_gain, beta=eps, out=c), out=column_gain)
    return row_gain * kernel * column_gain.transpose(1, 2)


def _project(streams, w, eps):
    """Streams f64 [T, 4, Hd] -> fn @ flatten(x) over the RMS of all four streams, f64."""
    flat = streams.flatten(1)
    dense = w.fn.double() if w.dense is None else w.dense
    mean_square = torch.linalg.vector_norm(flat, dim=1, keepdim=True).square_() / flat.shape[1]
    return torch.mm(flat, dense.t()).mul_(mean_square.add_(eps).rsqrt_())


def _weighted_sum(weights, streams):
    return torch.bmm(weights.unsqueeze(1), streams).squeeze(1)
