"""A retracted request is penalised as if it had never left its batch."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.sampling import penaltylib
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from dspark.host.target_penalties import recall_output

VOCAB = 8
KINDS = {
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
}
requests = st.builds(
    lambda output, frequency, presence, repetition, least: SimpleNamespace(
        output_ids=output,
        tokenizer=SimpleNamespace(eos_token_id=0, additional_stop_token_ids=None),
        sampling_params=SimpleNamespace(
            frequency_penalty=frequency,
            presence_penalty=presence,
            repetition_penalty=repetition,
            min_new_tokens=least,
            stop_token_ids={1},
        ),
    ),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=12),
    frequency=st.sampled_from([0.0, 0.6, 0.1]),
    presence=st.sampled_from([0.0, 1.1]),
    repetition=st.sampled_from([1.0, 1.3]),
    least=st.integers(0, 14),
)


class Batch(SimpleNamespace):
    """SGLang holds batches by weak references, which the plain class does not allow."""


def batch_of(reqs):
    batch = Batch(reqs=reqs, device="cpu", spec_algorithm=SpeculativeAlgorithm.NONE)
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(VOCAB, batch, KINDS)
    batch.sampling_info = SimpleNamespace(penalizer_orchestrator=orchestrator)
    return batch


def penalties(orchestrator, rows):
    additive = torch.zeros(rows, VOCAB)
    orchestrator.accumulate_additive_penalties(additive)
    scaling = orchestrator.accumulate_scaling_penalties()
    return additive, torch.ones(rows, VOCAB) if scaling is None else scaling


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(requests, min_size=1, max_size=4))
def test_output_so_far_counts_again_bit_for_bit(reqs):
    batch = batch_of(reqs)
    recall_output(batch)
    found = penalties(batch.sampling_info.penalizer_orchestrator, len(reqs))
    for row, req in enumerate(reqs):
        alone = batch_of([req])
        for token in req.output_ids:
            alone.sampling_info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor([token]))
        expected = penalties(alone.sampling_info.penalizer_orchestrator, 1)
        for name, one, all_rows in zip(("added", "scaled"), expected, found, strict=True):
            assert torch.equal(one[0], all_rows[row]), name
