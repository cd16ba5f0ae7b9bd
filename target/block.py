"""One transformer block around its two hyper-connection sites."""

from collections.abc import Callable

import torch

from dspark.kernels.collective import tp_sum
from dspark.kernels.hyper import mhc_head, mhc_post, mhc_pre
from dspark.target.config import ModelConfig
from dspark.target.moe import moe
from dspark.target.weights import BlockWeights, HyperSite

Sublayer = Callable[[torch.Tensor], torch.Tensor]  # [T, hidden] -> [T, hidden] rank partial


def hyper_site(
    streams: torch.Tensor,
    site: HyperSite,
    norm: torch.Tensor,
    config: ModelConfig,
    group,
    sublayer: Sublayer,
) -> torch.Tensor:
    """Mix the four residual streams into one input, run `sublayer`, spread its output back.

    `group` is the tensor-parallel process group, or None on one rank.
    """
    pre = mhc_pre(
        streams,
        site.fn,
        site.scale,
        site.base,
        norm,
        config.rms_norm_eps,
        config.hc_eps,
        config.hc_sinkhorn_iters,
    )
    out = tp_sum(sublayer(pre.y), group)
    return mhc_post(out, streams, pre.post, pre.comb)


def block(
    streams: torch.Tensor,
    token_ids: torch.Tensor,
    w: BlockWeights,
    config: ModelConfig,
    group,
    attention: Sublayer,
) -> torch.Tensor:
    """[T, 4, hidden] -> [T, 4, hidden]; target and draft differ only in `attention`."""
    streams = hyper_site(streams, w.hc_attn, w.attn_norm, config, group, attention)
    return hyper_site(
        streams, w.hc_ffn, w.ffn_norm, config, group, lambda x: moe(x, token_ids, w.moe, config)
    )


def collapse_streams(streams: torch.Tensor, head: HyperSite, config: ModelConfig) -> torch.Tensor:
    """[T, 4, hidden] -> [T, hidden], before the final norm."""
    return mhc_head(streams, head.fn, head.scale, head.base, config.rms_norm_eps, config.hc_eps)
