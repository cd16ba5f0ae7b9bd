"""What the host makes of a decode step: each request's accepted run, and the counters of it.

Only tokens that a request takes are delivered, committed and counted. What was accepted behind
its end is none of its output, and neither is a step that ran once more for a finished request.
"""

from typing import Any, NamedTuple

from dspark.host import finish
from dspark.host.sampling_info import is_sampled


class Delivered(NamedTuple):
    """Counts of one request's verify step."""

    tokens: int  # taken by the request; the first of them needs no draft
    uncapped: int  # tokens that would have been taken, had the budget not cut verification
    rows: int  # verified: the last emitted token and the drafts the budget allowed


def is_live(req: Any) -> bool:
    """Whether the request still takes tokens; with overlapped steps its last step may not be."""
    return not (req.is_retracted or req.finished())


def advance_grammars(result: Any, batch: Any) -> None:
    """In place of `advance_grammar_fsm`, for DSpark batches; the first caller has it done.

    Called in the middle of the next step, whose masks depend on it, or before the result of this
    one is read. The runs stay in `result.grammar_retained_tokens`, None for a request that is not
    live.
    """
    if result.grammar_advanced:
        return
    if result.copy_done is not None:
        result.copy_done.synchronize()
    tokens = result.next_token_ids.tolist()
    if batch.forward_mode.is_decode():
        stride = result.speculative_num_draft_tokens
        result.grammar_retained_tokens = [
            finish.take(req, tokens[i * stride : i * stride + count]) if is_live(req) else None
            for i, (req, count) in enumerate(
                zip(batch.reqs, result.accept_lens.tolist(), strict=True)
            )
        ]
    else:
        for req, token in zip(batch.reqs, tokens, strict=True):
            in_prompt = req.inflight_middle_chunks > 0
            if req.grammar is not None and is_live(req) and not in_prompt:
                req.to_finish = finish.refusal(req, token) or req.to_finish
    result.grammar_advanced = True


def resolve(processor: Any, result: Any, batch: Any) -> list[list[int]]:
    """In place of `_resolve_spec_v2_tokens`: the tokens that each request takes of this step."""
    advance_grammars(result, batch)
    runs = [run or [] for run in result.grammar_retained_tokens]
    accepted, capped = result.accept_lens.tolist(), result.cap_lens.tolist()
    uncapped = result.block_accept_lens.tolist()
    steps, sampled = [], []
    for i, (req, run) in enumerate(zip(batch.reqs, runs, strict=True)):
        if not run:
            continue
        whole = uncapped[i] if len(run) == accepted[i] else len(run)
        steps.append(Delivered(len(run), whole, capped[i]))
        sampled.append(is_sampled(req.sampling_params))
        _count_for_request(req, steps[-1])
    processor.model_worker.on_verify_complete_cpu(
        [step.tokens - 1 for step in steps],
        batch_size=len(steps),
        acceptable_rows=[step.rows for step in steps],
        sampled=sampled,
        turn=result.turn,
    )
    _count_for_server(processor.metrics_reporter, result, steps, len(batch.reqs))
    return runs


def _count_for_request(req: Any, step: Delivered) -> None:
    req.kv_committed_len += step.tokens
    req.spec_verify_ct += 1
    req.spec_num_correct_drafts += step.tokens - 1
    req.update_spec_correct_drafts_histogram(step.tokens - 1)
    req.spec_num_block_accept_tokens += step.uncapped
    req.spec_num_cap_tokens += step.rows
    req.update_spec_cap_lens_histogram(step.rows)


def _count_for_server(reporter: Any, result: Any, steps: list[Delivered], rows: int) -> None:
    """SGLang adds the batch size to each of its sums: take off what did not run for anybody.

    Args:
        rows: requests of the batch, among them those that are finished.
    """
    result.num_correct_drafts = sum(step.tokens for step in steps) - rows
    result.num_correct_drafts_per_req_cpu = None  # only state-space models read it
    result.num_block_accept_tokens = sum(step.uncapped for step in steps)
    result.num_cap_tokens = sum(step.rows for step in steps)
    reporter.spec_num_forward_ct -= rows - len(steps)
