"""Hooks: what the scheduler makes of a step, and which step is next."""

from dspark.host.ours import is_ours


def is_our_draft(batch) -> bool:
    return batch.spec_algorithm.is_dspark() and is_ours()


def finish_in_token_order(original, req, new_accepted_len=1):
    """SGLang tests its rules one after the other on all new tokens, not token after token."""
    if not is_ours():
        return original(req, new_accepted_len)
    from sglang.srt.runtime_context import get_spec

    from dspark.host.finish import update_finish_state

    return update_finish_state(req, grammar_behind=get_spec().speculative_algorithm is None)


def advance_grammar_to_the_end(original, processor, result, batch):
    if not is_our_draft(batch):
        return original(processor, result, batch)
    from dspark.host.accepted_runs import advance_grammars

    return advance_grammars(result, batch)


def resolve_runs_to_the_end(original, processor, result, batch):
    if not is_our_draft(batch):
        return original(processor, result, batch)
    from dspark.host.accepted_runs import resolve

    return resolve(processor, result, batch)


def advance_grammar_first(original, processor, batch, result):
    """With DSpark a grammar has seen a token when its end is tested, also after a prompt."""
    if is_our_draft(batch):
        processor.advance_grammar_fsm(result, batch)
    return original(processor, batch, result)


def report_steps_that_ran(original, reporter, can_run_cuda_graph, **kwargs):
    """A step that ran for finished requests only would be divided by, and is none."""
    speculating = not reporter.scheduler.spec_algorithm.is_none()
    if speculating and is_ours() and reporter.spec_num_forward_ct == 0:
        return None
    return original(reporter, can_run_cuda_graph, **kwargs)


def add_dspark_section(original, scheduler, recv_req):
    output = original(scheduler, recv_req)
    section = output.internal_state.pop("dspark_info_record", None) or {}
    if is_ours():
        from dspark.host.server_section import of_target, running

        section |= of_target(scheduler.tp_worker.model_runner)
        section["requests"] = running(scheduler.running_batch.reqs)
    if section:
        output.internal_state["dspark"] = section
    if "mean_accepted_length" in section:
        # SGLang's own figure is as old as the last line of its log.
        output.internal_state["avg_spec_accept_length"] = section["mean_accepted_length"]
    return output


def measure_steps(original, scheduler, recv_req):
    """A warm-up begins or ends to measure what steps cost."""
    if not is_ours():
        return original(scheduler, recv_req)
    from dspark.host.step_measure import KEY

    if KEY not in recv_req.server_args:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    scheduler.draft_worker.measure_steps(bool(recv_req.server_args[KEY]))
    return SetInternalStateReqOutput(updated=True)


def decode_between_chunks(original, scheduler, running_batch):
    """SGLang runs all chunks of a long prompt before the next decode step."""
    if is_ours():
        from sglang.srt.managers.schedule_batch import NextBatchPlan

        from dspark.host.decode_turn import is_due

        if is_due(scheduler, running_batch):
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
    return original(scheduler, running_batch)
