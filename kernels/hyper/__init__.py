"""K05-K08: manifold-constrained hyper-connections around every attention and expert block.

A layer reads one vector mixed from four residual streams and writes its output back into all
four. Streams are [T, 4, Hd] in bf16 (served) or f32 (oracle, CPU only).
"""

import torch

from dspark.kernels.common.dispatch import use_triton
from dspark.kernels.hyper import kernel, reference
from dspark.kernels.hyper.reference import STREAMS, HyperWeight, MhcPre

__all__ = [
    "HyperWeight",
    "MhcPre",
    "mhc_head",
    "mhc_post",
    "mhc_post_pre",
    "mhc_pre",
    "prepare_hyper",
    "stream_mean",
]


def prepare_hyper(fn: torch.Tensor) -> HyperWeight:
    """Pack `hc_*_fn` f32 [24, 4*Hd] or `hc_head_fn` f32 [4, 4*Hd]; ValueError otherwise."""
    outputs = (STREAMS, 2 * STREAMS + STREAMS * STREAMS)
    if fn.dtype != torch.float32 or fn.ndim != 2 or fn.shape[0] not in outputs:
        raise ValueError(f"hc fn must be f32 [24 or 4, 4*Hd], got {fn.dtype} {tuple(fn.shape)}.")
    fn = fn.contiguous()
    return HyperWeight(fn, None if fn.is_cuda else fn.double())


def mhc_pre(
    x: torch.Tensor,
    w: HyperWeight,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_w: torch.Tensor,
    eps_norm: float,
    eps_hc: float,
    iters: int,
) -> MhcPre:
    """K05+K06: mix the streams into the normalised input of a sublayer.

    x: [T, 4, Hd]; w: [24, 4*Hd]; scale: f32 [3]; base: f32 [24] (4 pre, 4 post, 16 comb, row
    major); norm_w: [Hd]. `iters` Sinkhorn iterations (hc_sinkhorn_iters). See MhcPre for the
    result. Raises ValueError when the shapes disagree.
    """
    _check(x, w, outputs=2 * STREAMS + STREAMS * STREAMS)
    return _ops(x).mhc_pre(x, w, scale, base, norm_w, eps_norm, eps_hc, iters)


def mhc_post(
    f: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """K07: new stream k = post[k]*f + sum_j comb[j, k]*x[j].

    f: sublayer output [T, Hd]; x: old streams [T, 4, Hd]; post f32 [T, 4] and comb f32 [T, 4, 4]
    from mhc_pre. Returns [T, 4, Hd] in x's dtype. Raises ValueError when the shapes disagree.
    """
    _check_output(f, x)
    return _ops(x).mhc_post(f, x, post, comb)


def mhc_post_pre(
    f: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    w: HyperWeight,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_w: torch.Tensor,
    eps_norm: float,
    eps_hc: float,
    iters: int,
) -> tuple[torch.Tensor, MhcPre]:
    """mhc_post of one site and mhc_pre of the next in two launches instead of three.

    The arguments of both, in order. Returns the new streams [T, 4, Hd] and the MhcPre read from
    them. Raises ValueError when the shapes disagree.
    """
    _check_output(f, x)
    _check(x, w, outputs=2 * STREAMS + STREAMS * STREAMS)
    arguments = (w, scale, base, norm_w, eps_norm, eps_hc, iters)
    return _ops(x).mhc_post_pre(f, x, post, comb, *arguments)


def mhc_head(
    x: torch.Tensor,
    w: HyperWeight,
    scale: torch.Tensor,
    base: torch.Tensor,
    eps_norm: float,
    eps_hc: float,
) -> torch.Tensor:
    """K08: collapse the streams after the last layer.

    x: [T, 4, Hd]; w: [4, 4*Hd]; scale: f32 [1]; base: f32 [4]. Returns [T, Hd] in x's dtype, not
    yet normalised. Raises ValueError when the shapes disagree.
    """
    _check(x, w, outputs=STREAMS)
    return _ops(x).mhc_head(x, w, scale, base, eps_norm, eps_hc)


def stream_mean(x: torch.Tensor) -> torch.Tensor:
    """Mean of the four streams, [T, 4, Hd] -> [T, Hd]: what DSpark captures of a target layer."""
    return _ops(x).stream_mean(x)


def _ops(x: torch.Tensor):
    """The implementation for x; the oracle's f32 streams always take the reference."""
    return kernel if use_triton(x) and x.dtype == torch.bfloat16 else reference


def _check(x: torch.Tensor, w: HyperWeight, outputs: int) -> None:
    if w.fn.shape != (outputs, x[0].numel() if len(x) else x.shape[1] * x.shape[2]):
        raise ValueError(f"hc fn {tuple(w.fn.shape)} does not fit streams {tuple(x.shape)}.")
    if not x.is_contiguous():
        raise ValueError("Streams must be contiguous.")


def _check_output(f: torch.Tensor, x: torch.Tensor) -> None:
    if f.shape != (x.shape[0], x.shape[2]):
        raise ValueError(f"Sublayer output {tuple(f.shape)} does not fit streams {tuple(x.shape)}.")
    if not (f.is_contiguous() and x.is_contiguous()):
        raise ValueError("Streams and sublayer output must be contiguous.")
