"""Log probabilities of emitted tokens, by the formulas of SGLang's sampler."""

import torch
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB
from sglang.srt.runtime_context import get_exec


def attach(logits_output, logits: torch.Tensor, tokens: torch.Tensor, batch) -> None:
    """Store what the requests want to know about `tokens` in SGLang's result.

    Args:
        logits: f32 [R * rows, N] adjusted logits, before top-k and the like.
        tokens: i64 [R, rows]; row j of the logits chose token j.
        batch: ScheduleBatch of the R requests.
    """
    attach_to(
        logits_output,
        logits,
        tokens,
        batch.sampling_info,
        batch.top_logprobs_nums,
        batch.token_ids_logprobs,
    )


def attach_to(
    logits_output, logits: torch.Tensor, tokens: torch.Tensor, info, top_nums, token_ids
) -> None:
    """`attach` for a batch known by its SamplingBatchInfo and what each request wants to know."""
    rows = tokens.shape[1]
    values = _log_probabilities(logits, info, rows)
    result = OutputLogprobProcessor().compute_logprobs(
        values,
        [n for n in top_nums for _ in range(rows)],
        [ids for ids in token_ids for _ in range(rows)],
        tokens.flatten(),
    )
    result.write_output_to(logits_output)
    if rows > 1:
        flat = logits_output.next_token_logprobs
        logits_output.next_token_logprobs = flat.view(tokens.shape)


def _log_probabilities(logits: torch.Tensor, info, rows: int) -> torch.Tensor:
    if info.is_all_greedy or SGLANG_RETURN_ORIGINAL_LOGPROB:
        return torch.log_softmax(logits, -1)
    scaled = logits / info.temperatures.repeat_interleave(rows, 0)
    if get_exec().deterministic.enable_deterministic_inference:
        return torch.log_softmax(scaled, -1)
    return torch.log(torch.softmax(scaled, -1))
