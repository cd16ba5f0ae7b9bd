"""What SGLang's `SamplingBatchInfo` says about the sampling of a batch."""

from typing import Any

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor

from dspark.speculation.sampling import RequestParams


def request_params(info: Any) -> RequestParams:
    """Read SGLang's SamplingBatchInfo; a greedy request arrives as top_k 1."""
    cut = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    return RequestParams(
        info.temperatures.view(-1).float(),
        info.top_ks.view(-1) <= 1,
        info.top_ks.view(-1),
        info.top_ps.view(-1),
        info.min_ps.view(-1),
        bool(info.is_all_greedy),
        bool(cut),
    )


def adjust(logits: torch.Tensor, info: Any, mask: Any) -> None:
    """Add grammar mask, bias and custom processors in place (penalties come before them).

    Args:
        logits: f32 [R, V, N].
        info: SamplingBatchInfo of the R requests.
        mask: GrammarMask of R * V rows, or None.
    """
    if mask is not None:
        mask.apply(logits.view(-1, logits.shape[-1]))
    if info.logit_bias is not None:
        logits.add_(info.logit_bias[:, None])
    if info.has_custom_logit_processor:
        # Processors expect one row per request, in the order of their parameters.
        for row in logits.unbind(1):
            apply_custom_logit_processor(row, info)
