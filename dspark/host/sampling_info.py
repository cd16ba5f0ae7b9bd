"""What SGLang's `SamplingBatchInfo` says about the sampling of a batch."""

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor

from dspark.speculation.sampling import RequestParams, request_seed

HOTTEST = 1e30  # beyond this the noise would overflow; all tokens are equally likely long before


def request_params(info: Any) -> RequestParams:
    """Read SGLang's SamplingBatchInfo; a greedy request arrives as top_k 1."""
    cut = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    top_k = info.top_ks.view(-1)
    return RequestParams(
        torch.where(top_k <= 1, 0.0, info.temperatures.view(-1).float().clamp(max=HOTTEST)),
        top_k,
        info.top_ps.view(-1),
        info.min_ps.view(-1),
        bool(info.is_all_greedy),
        bool(cut),
    )


def samples_without_seed(params: Any) -> bool:
    """params: SGLang's SamplingParams of one request."""
    return params.top_k > 1 and params.sampling_seed is None


def seeds_of(reqs: Sequence[Any], server_seed: int) -> torch.Tensor:
    """i64 [R] on the host: what each request draws its tokens by."""
    seeds = [request_seed(server_seed, req.rid, req.sampling_params.sampling_seed) for req in reqs]
    return torch.tensor(seeds, dtype=torch.int64)


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
