"""Penalties of target-only serving, made exact: what DSpark output is compared with.

While SGLang overlaps steps, its penalties miss the token of the step in flight and count the
prompt's last token instead. Here that token is counted at the head of the forward, where it is
on the device. Without overlap SGLang applies additive and scaling penalties in the order of a
set, which changes from process to process; here additive ones always come first. A request
that was retracted starts from nothing in SGLang; here its output so far is counted again. And
min_new_tokens knows no end token but the tokenizer's; here it holds all of them back.
"""

from typing import Any

import torch

# What SGLang's penalizers have added up, each [R, ...]; a name is there once it is prepared.
SUMS = (
    "cumulated_frequency_penalties",
    "cumulated_presence_penalties",
    "cumulated_repetition_penalties",
    "len_output_tokens",
)


def count_token_in_flight(batch: Any) -> None:
    """Head of an overlapped decode: `batch.input_ids` i64 [R] are the last emitted tokens."""
    info = batch.sampling_info
    if not batch.spec_algorithm.is_none() or not batch.forward_mode.is_decode() or info is None:
        return
    orchestrator = info.penalizer_orchestrator
    if orchestrator is not None and orchestrator.is_required:
        orchestrator.cumulate_output_tokens(batch.input_ids.to(torch.int64))


def recall_output(batch: Any) -> None:
    """Count what retracted requests of a new prompt batch had generated, token by token.

    SGLang counts one token of every request at a time. Requests are therefore counted one by one,
    in a copy of the batch's sums, of which only the request's own row is kept.
    """
    orchestrator = batch.sampling_info.penalizer_orchestrator
    if not batch.spec_algorithm.is_none() or not orchestrator.is_required:
        return
    sums = [
        (penalizer, name)
        for penalizer in orchestrator.penalizers.values()
        for name in SUMS
        if hasattr(penalizer, name)
    ]
    for row, req in enumerate(batch.reqs):
        if not req.output_ids:
            continue
        others = [getattr(penalizer, name).clone() for penalizer, name in sums]
        for token in req.output_ids:
            same = torch.full((len(batch.reqs),), token, dtype=torch.int64, device=batch.device)
            orchestrator.cumulate_output_tokens(same)
        for (penalizer, name), before in zip(sums, others, strict=True):
            before[row] = getattr(penalizer, name)[row]
            setattr(penalizer, name, before)


def hold_back_every_end(penalizer: Any) -> None:
    """Add the end tokens of config.json to those that min_new_tokens holds back.

    SGLang's penalizer has prepared `stop_token_penalties`, f32 [R, N]: -inf at the tokenizer's end
    token and the request's stops, 0 elsewhere. A request ends at any id of `eos_token_id`, too.
    """
    for row, req in enumerate(penalizer.orchestrator.reqs()):
        penalizer.stop_token_penalties[row, sorted(req.eos_token_ids or ())] = float("-inf")


def apply_in_order(orchestrator: Any, logits: torch.Tensor) -> None:
    """Penalise f32 [R, N] in place: first everything that is added, then what scales."""
    additive = torch.zeros_like(logits, dtype=torch.float32)
    orchestrator.accumulate_additive_penalties(additive)
    logits.add_(additive)
    scale = orchestrator.accumulate_scaling_penalties()
    if scale is not None:
        logits.copy_(torch.where(logits < 0, logits * scale, logits / scale))
