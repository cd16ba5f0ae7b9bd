"""Only what a request takes is committed and counted, for itself and for the server."""

from array import array
from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams

from dspark.host.accepted_runs import resolve
from dspark.host.server_section import running
from dspark.host.step_result import StepResult
from dspark.speculation.turn import NO_DRAFT

DEPTH = 5


def request(limit: int, temperature: float = 1.0) -> Req:
    params = SamplingParams(max_new_tokens=limit, ignore_eos=True, temperature=temperature)
    params.normalize(None)
    req = Req("rid", "", array("q", [5, 6]), params, vocab_size=100)
    req.output_ids.append(7)
    req.kv_committed_len = 2
    return req


def test_a_cut_run_and_a_finished_request():
    whole, cut, finished = request(20), request(3, temperature=0.0), request(20)
    finished.finished_reason = FINISH_LENGTH(1)
    reqs = [whole, cut, finished]
    width = DEPTH + 1
    result = StepResult(
        next_token_ids=torch.arange(10, 10 + 3 * width),
        accept_lens=torch.tensor([4, 6, 3]),
        block_accept_lens=torch.tensor([5, 6, 3]),
        cap_lens=torch.tensor([4, 6, 6]),
        speculative_num_draft_tokens=width,
        turn=NO_DRAFT,
    )
    records = []
    processor = SimpleNamespace(
        model_worker=SimpleNamespace(
            on_verify_complete_cpu=lambda *args, **named: records.append((*args, named))
        ),
        metrics_reporter=SimpleNamespace(spec_num_forward_ct=0),
    )
    batch = SimpleNamespace(reqs=reqs, forward_mode=ForwardMode.DECODE)
    assert resolve(processor, result, batch) == [[10, 11, 12, 13], [16, 17], []]
    assert [req.kv_committed_len for req in reqs] == [6, 4, 2]
    assert [req.spec_verify_ct for req in reqs] == [1, 1, 0]
    assert [req.spec_num_correct_drafts for req in reqs] == [3, 1, 0]
    assert [req.spec_num_block_accept_tokens for req in reqs] == [5, 2, 0]
    assert [req.spec_num_cap_tokens for req in reqs] == [4, 6, 0]
    told = {"batch_size": 2, "acceptable_rows": [4, 6], "sampled": [True, False], "turn": NO_DRAFT}
    assert records == [([3, 1], told)]
    # SGLang adds the three rows of the batch to both of these.
    assert result.num_correct_drafts + len(reqs) == 6
    assert processor.metrics_reporter.spec_num_forward_ct + len(reqs) == 2
    assert [list(req.output_ids) for req in reqs] == [[7]] * 3


def test_requests_that_decode_are_listed_with_their_steps():
    drafting, alone, finished = request(20), request(20), request(20)
    finished.finished_reason = FINISH_LENGTH(1)
    drafting.spec_verify_ct, drafting.spec_num_correct_drafts = 4, 10
    drafting.spec_num_cap_tokens = 20
    assert running([drafting, alone, finished]) == [
        {"rid": "rid", "prompt": 2, "written": 1, "steps": 4, "delivered": 14, "rows": 20},
        {"rid": "rid", "prompt": 2, "written": 1, "steps": 0, "delivered": 0, "rows": 0},
    ]
