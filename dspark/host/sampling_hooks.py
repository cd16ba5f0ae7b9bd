"""Hooks: penalties, seeds, draws and log probabilities."""

from dspark.host.ours import is_ours


def count_penalties_later(original, batch):
    if batch.enable_overlap and is_ours():
        return None  # counted by count_penalties_at_forward
    return original(batch)


def count_penalties_at_forward(original, scheduler, batch, overlap):
    if overlap and is_ours():
        from dspark.host.target_penalties import count_token_in_flight

        count_token_in_flight(batch)
    return original(scheduler, batch, overlap=overlap)


def recall_penalties(original, batch):
    original(batch)
    if is_ours():
        from dspark.host.target_penalties import recall_output

        recall_output(batch)


def hold_back_every_end(original, penalizer):
    original(penalizer)
    if is_ours():
        from dspark.host.target_penalties import hold_back_every_end

        hold_back_every_end(penalizer)


def penalise_in_order(original, orchestrator, logits, repeat=None):
    if repeat is not None or not is_ours():
        return original(orchestrator, logits, repeat)
    from dspark.host.target_penalties import apply_in_order

    return apply_in_order(orchestrator, logits)


def name_seeds(original, info, batch, vocab_size):
    """SGLang reads seeds only where a server-wide flag asks for it, and never derives any."""
    original(info, batch, vocab_size)
    if batch.spec_algorithm.is_none() and is_ours():
        from sglang.srt.runtime_context import get_server_args

        from dspark.host.sampling_info import seeds_of

        info.sampling_seed = seeds_of(batch.reqs, get_server_args().random_seed).to(
            info.device, non_blocking=True
        )


def draw_as_drafts_are_judged(
    original,
    sampler,
    logits_output,
    sampling_info,
    return_logprob,
    top_logprobs_nums,
    token_ids_logprobs,
    positions,
):
    """Target-only: the same token for a seed and a position as with drafts."""
    given = (
        logits_output,
        sampling_info,
        return_logprob,
        top_logprobs_nums,
        token_ids_logprobs,
        positions,
    )
    if not is_ours():
        return original(sampler, *given)
    from dspark.host.target_sampler import sample

    return sample(sampler, *given)


def prepare_logits(original, sampler, logits, sampling_info):
    if not is_ours():
        return original(sampler, logits, sampling_info)
    from dspark.host.target_sampler import prepare

    return prepare(logits, sampling_info)


def relay_ordinary_tokens(original, scheduler, future_indices, batch_result):
    """The device goes on with a token that exists; the host sees the mark."""
    marked = batch_result.next_token_ids
    if batch_result.next_draft_input is not None or marked is None or not is_ours():
        return original(scheduler, future_indices, batch_result)
    from dspark.host.target_sampler import unmarked

    batch_result.next_token_ids = unmarked(marked)
    original(scheduler, future_indices, batch_result)
    batch_result.next_token_ids = marked


def empty_rows_as_tensors(
    original,
    logprobs,
    token_ids_logprobs_list,
    stage,
    extend_logprob_pruned_lens_cpu=None,
    no_copy_to_cpu=False,
):
    """get_token_ids_logprobs_raw: a request that asks for no tokens beside one that does.

    SGLang puts an empty list among the tensors, and the scheduler then ends on asking it for its
    values.
    """
    values, tokens = original(
        logprobs,
        token_ids_logprobs_list,
        stage,
        extend_logprob_pruned_lens_cpu,
        no_copy_to_cpu,
    )
    if no_copy_to_cpu and is_ours():
        values = [logprobs.new_empty(0) if isinstance(row, list) else row for row in values]
    return values, tokens
