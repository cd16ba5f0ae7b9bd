"""Manifold-constrained hyper-connections around every attention and expert block.

A layer reads one vector mixed from four residual streams and writes its output back into all
four. Streams are [T, 4, Hd] in bf16 (served) or f32 (oracle).
"""

import torch
from torch import Tensor

from dspark.kernels.common.dispatch import op
from dspark.kernels.hyper import reference
from dspark.kernels.hyper.reference import STREAMS
from dspark.kernels.hyper.types import HyperNumbers, HyperSite, HyperWeight, MhcPre

__all__ = [
    "HyperNumbers",
    "HyperSite",
    "HyperWeight",
    "MhcPre",
    "mhc_head",
    "mhc_post",
    "mhc_post_pre",
    "mhc_pre",
    "prepare_hyper",
    "stream_mean",
]

SITE_OUTPUTS = 2 * STREAMS + STREAMS * STREAMS


def prepare_hyper(fn: Tensor) -> HyperWeight:
    """Pack `hc_*_fn` f32 [24, 4*Hd] or `hc_head_fn` f32 [4, 4*Hd]; ValueError otherwise."""
    if fn.dtype != torch.float32 or fn.ndim != 2 or fn.shape[0] not in (STREAMS, SITE_OUTPUTS):
        raise ValueError(f"hc fn must be f32 [24 or 4, 4*Hd], got {fn.dtype} {tuple(fn.shape)}.")
    fn = fn.contiguous()
    return HyperWeight(fn, None if fn.is_cuda else fn.double())


def _is_oracle(x: Tensor) -> bool:
    """The oracle's streams always take the reference."""
    return x.dtype != torch.bfloat16


def _site_fits(x: Tensor, site: HyperSite) -> None:
    _streams_fit(x, site, outputs=SITE_OUTPUTS)


def _head_fits(x: Tensor, site: HyperSite) -> None:
    _streams_fit(x, site, outputs=STREAMS)


def _output_fits(f: Tensor, x: Tensor) -> None:
    if f.shape != (x.shape[0], x.shape[2]):
        raise ValueError(f"Sublayer output {tuple(f.shape)} does not fit streams {tuple(x.shape)}.")
    if not (f.is_contiguous() and x.is_contiguous()):
        raise ValueError("Streams and sublayer output must be contiguous.")


def _output_and_site_fit(f: Tensor, x: Tensor, site: HyperSite) -> None:
    _output_fits(f, x)
    _site_fits(x, site)


def _streams_fit(x: Tensor, site: HyperSite, outputs: int) -> None:
    fn = site.fn.fn
    if fn.shape != (outputs, x.shape[1] * x.shape[2]):
        raise ValueError(f"hc fn {tuple(fn.shape)} does not fit streams {tuple(x.shape)}.")
    if not x.is_contiguous():
        raise ValueError("Streams must be contiguous.")


mhc_pre = op(reference.mhc_pre, check=_site_fits, reference_if=_is_oracle)
mhc_post = op(reference.mhc_post, check=_output_fits, reference_if=_is_oracle)
mhc_post_pre = op(reference.mhc_post_pre, check=_output_and_site_fit, reference_if=_is_oracle)
mhc_head = op(reference.mhc_head, check=_head_fits, reference_if=_is_oracle)
stream_mean = op(reference.stream_mean, reference_if=_is_oracle)
