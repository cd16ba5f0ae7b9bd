"""Penalties of every row of a verify block equal those SGLang applies one decode step at a time."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from dspark.host.target_penalties import (
    apply_in_order,
    count_token_in_flight,
    hold_back_every_end,
)
from dspark.speculation.penalties import Penalties, is_penalised, stop_ids

VOCAB, ROWS = 24, 6
SETTINGS = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.1},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 9, "stop_token_ids": [3, 5]},
    {"frequency_penalty": 0.1, "presence_penalty": 0.2, "repetition_penalty": 0.8},
    {},
]


def request(settings, prompt=7, output=()):
    tokenizer = SimpleNamespace(eos_token_id=1, additional_stop_token_ids={2})
    params = SamplingParams(max_new_tokens=99, **settings)
    return SimpleNamespace(
        sampling_params=params,
        tokenizer=tokenizer,
        eos_token_ids={1, 11},  # config.json may name more than the tokenizer
        origin_input_ids=[4] * prompt,
        output_ids=list(output),
    )


class Batch(SimpleNamespace):
    """A ScheduleBatch as far as penalisers look; SGLang holds it by weak reference."""

    __slots__ = ("__weakref__",)


def stock(reqs):
    """The batch, which must outlive them, and SGLang's penalisers for its requests."""
    batch = Batch(reqs=reqs, device="cpu")
    kinds = [
        BatchedFrequencyPenalizer,
        BatchedMinNewTokensPenalizer,
        BatchedPresencePenalizer,
        BatchedRepetitionPenalizer,
    ]
    made = BatchedPenalizerOrchestrator(VOCAB, batch, kinds)
    minimum = made.penalizers[BatchedMinNewTokensPenalizer]
    if minimum.is_prepared():
        hold_back_every_end(minimum)
    return batch, made


def penalise_by_stock(orchestrator, logits):
    """As SGLang's decode does: additive first, then scaling."""
    additive = torch.zeros_like(logits)
    orchestrator.accumulate_additive_penalties(additive)
    logits = logits + additive
    scale = orchestrator.accumulate_scaling_penalties()
    if scale is None:
        return logits
    return torch.where(logits < 0, logits * scale, logits / scale)


@pytest.mark.parametrize("seed", range(3))
def test_verify_rows_equal_single_decode_steps_bit_for_bit(seed):
    generator = torch.Generator().manual_seed(seed)
    reqs = [request(settings, prompt=5 + i) for i, settings in enumerate(SETTINGS)]
    batch, reference = stock(reqs)
    slot = torch.arange(1, len(reqs) + 1)
    ours = Penalties(len(reqs) + 1, VOCAB, "cpu")
    ours.admit(slot, reqs)
    prompts = torch.tensor([len(r.origin_input_ids) for r in reqs])
    first = torch.randint(0, VOCAB, (len(reqs),), generator=generator)
    ours.commit(slot, first[:, None], torch.ones_like(slot))
    reference.cumulate_output_tokens(first)
    position = prompts.clone()
    for _ in range(4):  # verify steps; all requests commit the same number for simplicity
        drafts = torch.randint(0, VOCAB, (len(reqs), ROWS - 1), generator=generator)
        logits = torch.randn(len(reqs), ROWS, VOCAB, generator=generator)
        rows = logits.clone()
        ours.apply(rows, slot, drafts, position)
        commit = int(torch.randint(1, ROWS + 1, (1,), generator=generator))
        emitted = torch.cat([drafts, drafts[:, :1]], 1)
        emitted[:, commit - 1] = torch.randint(0, VOCAB, (len(reqs),), generator=generator)
        for j in range(commit):
            assert torch.equal(rows[:, j], penalise_by_stock(reference, logits[:, j])), j
            reference.cumulate_output_tokens(emitted[:, j])
        ours.commit(slot, emitted, torch.full_like(slot, commit))
        position = position + commit
    del batch


def test_a_request_without_penalties_is_untouched_beside_others():
    reqs = [request(SETTINGS[4]), request({})]
    ours = Penalties(3, VOCAB, "cpu")
    ours.admit(torch.tensor([1, 2]), reqs)
    tokens = torch.tensor([[3, 4], [5, 6]])
    ours.commit(torch.tensor([1, 2]), tokens, torch.tensor([2, 2]))
    logits = torch.randn(2, ROWS, VOCAB)
    rows = logits.clone()
    drafts = torch.randint(0, VOCAB, (2, ROWS - 1))
    ours.apply(rows, torch.tensor([1, 2]), drafts, torch.tensor([9, 9]))
    assert torch.equal(rows[1], logits[1])
    assert not torch.equal(rows[0], logits[0])


def test_a_new_owner_inherits_nothing_and_a_retracted_request_keeps_its_output():
    ours = Penalties(2, VOCAB, "cpu")
    ours.admit(torch.tensor([1]), [request(SETTINGS[1], output=[7])])
    ours.commit(torch.tensor([1]), torch.tensor([[8]]), torch.tensor([1]))
    assert ours.seen[1].nonzero().flatten().tolist() == [7, 8]
    ours.admit(torch.tensor([1]), [request(SETTINGS[1])])
    assert not ours.seen.any()
    assert not ours.frequency_sum.any()


@pytest.mark.parametrize("count", [8192, 8193, 20000])
def test_a_long_output_is_recalled_in_parts(count):
    """More tokens than one upload holds are added up as if they were one."""
    output = [i % 7 for i in range(count)]
    ours = Penalties(2, VOCAB, "cpu")
    # A quarter has exact sums, so that the order of adding does not matter to this test.
    ours.admit(torch.tensor([1]), [request({"frequency_penalty": 0.25}, output=output)])
    expected = torch.tensor(output).bincount(minlength=VOCAB) * 0.25
    assert torch.equal(ours.frequency_sum[1], expected)


def test_uncommitted_tokens_are_not_counted():
    ours = Penalties(2, VOCAB, "cpu")
    ours.admit(torch.tensor([1]), [request(SETTINGS[0])])
    ours.commit(torch.tensor([1]), torch.tensor([[7, 8, 7, 9, 9, 9]]), torch.tensor([3]))
    assert ours.frequency_sum[1, 7] == pytest.approx(1.4)
    assert ours.seen[1].nonzero().flatten().tolist() == [7, 8]


@pytest.mark.parametrize("settings", SETTINGS)
def test_penalised_requests_are_recognised(settings):
    assert is_penalised(SamplingParams(**settings)) == bool(settings)


# Target-only serving.


def test_min_new_tokens_holds_back_every_end_token_in_both_modes():
    """The tokenizer's (1, 2), the request's (3, 5), and that of config.json alone (11)."""
    req = request(SETTINGS[3])
    batch, reference = stock([req, request({})])
    row, other = penalise_by_stock(reference, torch.zeros(2, VOCAB))
    assert torch.where(row == -torch.inf)[0].tolist() == [1, 2, 3, 5, 11]
    assert not other.any()  # a neighbour without a minimum
    assert stop_ids(req) == {1, 2, 3, 5, 11}
    del batch


def test_additive_penalties_come_before_scaling_ones():
    batch, reference = stock([request(SETTINGS[4])])
    reference.cumulate_output_tokens(torch.tensor([3]))
    logits = torch.randn(1, VOCAB)
    expected = penalise_by_stock(reference, logits)
    for order in itertools.permutations(reference.penalizers.items()):
        reference.penalizers = dict(order)
        ours = logits.clone()
        apply_in_order(reference, ours)
        assert torch.equal(ours, expected)
    del batch


def test_the_token_in_flight_is_counted_in_decode_only():
    counted = []
    orchestrator = SimpleNamespace(is_required=True, cumulate_output_tokens=counted.append)

    def step(decode, speculative=False):
        count_token_in_flight(
            SimpleNamespace(
                sampling_info=SimpleNamespace(penalizer_orchestrator=orchestrator),
                spec_algorithm=SimpleNamespace(is_none=lambda: not speculative),
                forward_mode=SimpleNamespace(is_decode=lambda: decode),
                input_ids=torch.tensor([4, 5]),
            )
        )

    step(decode=False)
    step(decode=True, speculative=True)
    assert counted == []
    step(decode=True)
    assert counted[0].tolist() == [4, 5]


def test_min_new_tokens_without_a_tokenizer_is_refused():
    """Nothing would tell which token ends a text; SGLang answers this ValueError with 400."""
    params = SamplingParams(max_new_tokens=9, min_new_tokens=4)
    with pytest.raises(ValueError, match="min_new_tokens=4 is unavailable"):
        params.normalize(None)
