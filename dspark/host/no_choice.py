"""Target-only serving: a row of logits without a usable number ends its request, not the server.

SGLang would take token 0, whatever a grammar forbids, or stop with an exception while sampling.
Here such a row is marked for the host by BROKEN, as the DSpark worker marks it, while the device
goes on with an ordinary token.
"""

from typing import Any

import torch

from dspark.host.finish import PLACEHOLDER
from dspark.speculation.requests import BROKEN

HUGE = 1e30  # stands for +inf: divided by any temperature it stays finite


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


def mark(tokens: torch.Tensor, sampling_info: Any) -> torch.Tensor:
    """Sampled tokens [R] with BROKEN where there was no choice."""
    return torch.where(sampling_info.no_choice, BROKEN, tokens)


def unmarked(tokens: torch.Tensor) -> torch.Tensor:
    """What the next step on the device takes as its input."""
    return torch.where(tokens == BROKEN, PLACEHOLDER, tokens)
