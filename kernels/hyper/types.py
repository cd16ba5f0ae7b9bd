"""Weights and constants of a hyper-connection site, and what a site returns."""

from typing import NamedTuple

import torch


class HyperWeight(NamedTuple):
    """Mixing projection of one site; `dense` is its fp64 copy, kept on CPU."""

    fn: torch.Tensor  # f32 [24 or 4, 4*Hd]
    dense: torch.Tensor | None  # f64, same shape


class HyperSite(NamedTuple):
    """Mixing weights of one site, or of the head behind the last layer."""

    fn: HyperWeight
    scale: torch.Tensor  # f32 [3] of pre, post and comb; [1] for the head
    base: torch.Tensor  # f32 [24]: 4 pre, 4 post, 16 comb, row major; [4] for the head


class HyperNumbers(NamedTuple):
    """Constants that all sites of a model share."""

    eps_norm: float  # of the norms before the mixing and before the sublayer
    eps_hc: float  # added to the weights of the mix and to the Sinkhorn sums (hc_eps)
    iters: int  # Sinkhorn iterations (hc_sinkhorn_iters)


class MhcPre(NamedTuple):
    """Sublayer input and the weights that put its output back into the streams."""

    y: torch.Tensor  # [T, Hd] normalised mix, dtype of the streams
    post: torch.Tensor  # f32 [T, 4] weight of the sublayer output per stream
    comb: torch.Tensor  # f32 [T, 4, 4]; entry [j, k] carries old stream j into new stream k
