"""Penalties of target-only serving, made exact: what DSpark output is compared with.

While SGLang overlaps steps, its penalties miss the token of the step in flight and count the
prompt's last token instead. Here that token is counted at the head of the forward, where it is
on the device. Without overlap SGLang applies additive and scaling penalties in the order of a
set, which changes from process to process; here additive ones always come first.
"""

from typing import Any

import torch


def count_token_in_flight(batch: Any) -> None:
    """Head of an overlapped decode: `batch.input_ids` i64 [R] are the last emitted tokens."""
    info = batch.sampling_info
    if not batch.spec_algorithm.is_none() or not batch.forward_mode.is_decode() or info is None:
        return
    orchestrator = info.penalizer_orchestrator
    if orchestrator is not None and orchestrator.is_required:
        orchestrator.cumulate_output_tokens(batch.input_ids.to(torch.int64))


def apply_in_order(orchestrator: Any, logits: torch.Tensor) -> None:
    """Penalise f32 [R, N] in place: first everything that is added, then what scales."""
    additive = torch.zeros_like(logits, dtype=torch.float32)
    orchestrator.accumulate_additive_penalties(additive)
    logits.add_(additive)
    scale = orchestrator.accumulate_scaling_penalties()
    if scale is not None:
        logits.copy_(torch.where(logits < 0, logits * scale, logits / scale))
