"""Transformer blocks as what they are here: a chain of hyper-connection sites.

A site mixes the four residual streams into one input, runs a sublayer on it and spreads the output
back over the streams. A block is two sites, attention and experts. Spreading at one site and
mixing at the next touch the same streams, so they are one op.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from dspark.kernels.collective import tp_sum
from dspark.kernels.hyper import (
    HyperNumbers,
    HyperSite,
    mhc_head,
    mhc_post,
    mhc_post_pre,
    mhc_pre,
)
from dspark.target.config import ModelConfig
from dspark.target.moe import moe
from dspark.target.weights import BlockWeights

Sublayer = Callable[[torch.Tensor], torch.Tensor]  # [T, hidden] -> [T, hidden] rank partial


class Site(NamedTuple):
    mix: HyperSite
    norm: torch.Tensor  # [hidden] weight of the norm before the sublayer
    sublayer: Sublayer


def block_sites(
    token_ids: torch.Tensor, w: BlockWeights, config: ModelConfig, attention: Sublayer
) -> tuple[Site, Site]:
    """The two sites of one block; target and draft differ only in `attention`."""
    return (
        Site(w.hc_attn, w.attn_norm, attention),
        Site(w.hc_ffn, w.ffn_norm, lambda x: moe(x, token_ids, w.moe, config)),
    )


def through_sites(
    embedded: torch.Tensor, sites: Sequence[Site], config: ModelConfig, group
) -> Iterator[torch.Tensor]:
    """Run `sites` in order; yields the streams [T, 4, hidden] after each.

    Args:
        embedded: [T, hidden]; the streams start as four copies of it.
        group: tensor-parallel process group, or None on one rank.
    """

    numbers = hyper_numbers(config)
    streams = embedded.unsqueeze(1).repeat(1, 4, 1)
    pre = mhc_pre(streams, sites[0].mix, sites[0].norm, numbers)
    for site, following in zip(sites, [*sites[1:], None], strict=True):
        out = tp_sum(site.sublayer(pre.y), group)
        if following is None:
            streams = mhc_post(out, streams, pre.post, pre.comb)
        else:
            streams, pre = mhc_post_pre(
                out, streams, pre.post, pre.comb, following.mix, following.norm, numbers
            )
        yield streams


def collapse_streams(streams: torch.Tensor, head: HyperSite, config: ModelConfig) -> torch.Tensor:
    """[T, 4, hidden] -> [T, hidden], before the final norm."""
    return mhc_head(streams, head, hyper_numbers(config))


def hyper_numbers(config: ModelConfig) -> HyperNumbers:
    return HyperNumbers(config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters)
