"""Target-only sampling, drawn by the function that judges drafts.

A seed then means the same tokens with and without DSpark. Log probabilities are reported as
SGLang's sampler does.

A row of logits without a usable number ends its request, not the server. SGLang would take token 0,
whatever a grammar forbids, or stop with an exception while sampling. Here such a row is marked for
the host by BROKEN, as the DSpark worker marks it, while the device goes on with an ordinary token.
"""

from typing import Any

import torch

from dspark.host.finish import PLACEHOLDER
from dspark.host.sampling_info import request_params, store_logprobs_of
from dspark.kernels.common.argmax import token_of
from dspark.speculation.sampling import BROKEN, draw

HUGE = 1e30  # stands for +inf: divided by any temperature it stays finite


def sample(
    sampler: Any,
    logits_output: Any,
    info: Any,
    return_logprob: bool,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[list[int]],
    positions: torch.Tensor,
) -> torch.Tensor:
    """Stands in for SGLang's `Sampler.forward`.

    Args:
        info: SamplingBatchInfo whose `sampling_seed` i64 [R] `sampling_hooks.name_seeds` has set.
        positions: [R] of the last token that was run; the next one's is one more.

    Returns:
        i64 [R] tokens, BROKEN for a row without a choice. Log probabilities are stored in
        `logits_output`.
    """
    logits = sampler._preprocess_logits(logits_output.next_token_logits, info)
    params = request_params(info)
    position = positions.to(torch.int64) + 1
    tokens = token_of(draw(logits, params, info.sampling_seed, position))
    if return_logprob:
        store_logprobs_of(
            logits_output, logits, tokens[:, None], info, top_logprobs_nums, token_ids_logprobs
        )
    sampler._sync_token_ids_across_tp(tokens, info)
    return torch.where(info.no_choice, BROKEN, tokens)


def prepare(logits: torch.Tensor, sampling_info: Any) -> torch.Tensor:
    """Custom processors, then logits that can be sampled from, in place.

    Args:
        logits: f32 [R, N]. `sampling_info.no_choice`, bool [R], notes the rows without a choice.
    """
    from sglang.srt.layers.sampler import apply_custom_logit_processor

    if sampling_info.has_custom_logit_processor:
        apply_custom_logit_processor(logits, sampling_info)
    sampling_info.no_choice = ~(logits > -torch.inf).any(-1)
    logits.nan_to_num_(nan=-torch.inf, posinf=HUGE, neginf=-torch.inf)
    return logits.masked_fill_(sampling_info.no_choice[:, None], 0.0)


def unmarked(tokens: torch.Tensor) -> torch.Tensor:
    """What the next step on the device takes as its input."""
    return torch.where(tokens == BROKEN, PLACEHOLDER, tokens)
