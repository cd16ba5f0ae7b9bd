"""Target-only sampling, drawn by the function that judges drafts.

A seed then means the same tokens with and without DSpark. Logits and log
probabilities are prepared and reported as SGLang's sampler does.
"""

from typing import Any

import torch

from dspark.host import logprobs, no_choice, sampling_info
from dspark.kernels.common.argmax import token_of
from dspark.speculation import sampling


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
    params = sampling_info.request_params(info)
    position = positions.to(torch.int64) + 1
    tokens = token_of(sampling.draw(logits, params, info.sampling_seed, position))
    if return_logprob:
        logprobs.attach_to(
            logits_output, logits, tokens[:, None], info, top_logprobs_nums, token_ids_logprobs
        )
    sampler._sync_token_ids_across_tp(tokens, info)
    return no_choice.mark(tokens, info)
