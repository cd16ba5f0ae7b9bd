"""Torch hyper-connections (mHC): four residual streams mixed by a doubly stochastic matrix."""

import torch
import torch.nn.functional as F

from dspark.kernels.common.row_chunks import over_rows
from dspark.kernels.hyper.types import HyperNumbers, HyperSite, MhcPre

STREAMS = 4
ROW_CHUNK = 128  # rows of 4 streams per fp64 temporary in prefill


# The 24 outputs are 4 pre, 4 post and 16 comb; each kind has its own scale.
SCALE_OF_OUTPUT = torch.tensor([0] * 4 + [1] * 4 + [2] * 16)


def mhc_pre(
    x: torch.Tensor,
    site: HyperSite,
    norm_w: torch.Tensor,
    numbers: HyperNumbers,
) -> MhcPre:
    """Mix the streams into the normalised input of a sublayer.

    x: [T, 4, Hd]; norm_w: [Hd]. Raises ValueError when the shapes disagree.
    """
    eps_norm, eps_hc, iters = numbers
    scales = site.scale.double()[SCALE_OF_OUTPUT]
    bias, norm = site.base.double(), norm_w.double()

    def mixed(rows):
        streams = rows.double()
        mix = torch.addcmul(bias, _project(streams, site.fn, eps_norm), scales)
        gates = torch.sigmoid(mix[:, : 2 * STREAMS])
        post = 2 * gates[:, STREAMS:]
        comb = sinkhorn(mix[:, 2 * STREAMS :].view(-1, STREAMS, STREAMS), eps_hc, iters)
        y = _weighted_sum(gates[:, :STREAMS] + eps_hc, streams).to(x.dtype)
        # The mean square is taken over the rounded mix, so a fused kernel can agree.
        y = F.rms_norm(y.double(), norm.shape, norm, eps_norm).to(x.dtype)
        return y, post.float(), comb.float()

    if x.shape[0] <= ROW_CHUNK:
        return MhcPre(*mixed(x))
    parts = [mixed(rows) for rows in x.split(ROW_CHUNK)]
    return MhcPre(*(torch.cat(part) for part in zip(*parts, strict=True)))


def mhc_post(
    f: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """New stream k = post[k]*f + sum_j comb[j, k]*x[j].

    f: sublayer output [T, Hd]; x: old streams [T, 4, Hd]; post f32 [T, 4] and comb f32 [T, 4, 4]
    from mhc_pre. Returns [T, 4, Hd] in x's dtype. Raises ValueError when the shapes disagree.
    """
    carried = torch.bmm(comb.double().transpose(1, 2), x.double())  # new stream k, old stream j
    return torch.addcmul(carried, post.double().unsqueeze(-1), f.double().unsqueeze(1)).to(x.dtype)


def mhc_post_pre(
    f: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    site: HyperSite,
    norm_w: torch.Tensor,
    numbers: HyperNumbers,
) -> tuple[torch.Tensor, MhcPre]:
    """mhc_post of one site and mhc_pre of the next in two launches instead of three.

    The arguments of both, in order. Returns the new streams [T, 4, Hd] and the MhcPre read from
    them. Raises ValueError when the shapes disagree.
    """
    streams = mhc_post(f, x, post, comb)
    return streams, mhc_pre(streams, site, norm_w, numbers)


def mhc_head(x: torch.Tensor, site: HyperSite, numbers: HyperNumbers) -> torch.Tensor:
    """Collapse the streams after the last layer.

    x: [T, 4, Hd]. Returns [T, Hd] in x's dtype, not yet normalised. Raises ValueError when the
    shapes disagree.
    """
    eps_norm, eps_hc, _ = numbers

    def head(rows):
        streams = rows.double()
        z = _project(streams, site.fn, eps_norm)
        pre = torch.sigmoid(torch.addcmul(site.base.double(), z, site.scale.double())) + eps_hc
        return _weighted_sum(pre, streams).to(x.dtype)

    return over_rows(head, x)


def stream_mean(x: torch.Tensor) -> torch.Tensor:
    """Mean of the four streams, [T, 4, Hd] -> [T, Hd]: what DSpark captures of a target layer."""
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
