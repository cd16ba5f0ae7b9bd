"""Acceptance and calibration figures, by hand."""

import pytest
import torch

from dspark import embedded
from dspark.bench.eval_embedded import chance_error, reliability, summarise
from dspark.bench.train_embedded import corpus, overlap

ALWAYS, EVEN = 40.0, 0.0  # logits of chance 1 and 1/2


def test_acceptance_of_four_blocks():
    logits = torch.zeros(4, 3, dtype=torch.float64)
    figures = summarise(logits, torch.tensor([0, 1, 3, 3]), (1.0, 1.0, 1.0))
    assert figures["blocks"] == 4
    assert figures["accepted_length"] == 1 + 7 / 4
    assert figures["conditional"] == [3 / 4, 2 / 3, 1.0]
    none = summarise(logits, torch.tensor([0, 0, 0, 0]), (1.0, 1.0, 1.0))
    assert none["conditional"] == [0.0, None, None]


def test_calibration_error_is_of_the_whole_run_of_drafts():
    """Half of the blocks accept both drafts, half none: (1/2, 1) is calibrated, (1, 1/2) is not."""
    accepted = torch.tensor([2, 0])
    right = torch.tensor([[EVEN, ALWAYS]] * 2, dtype=torch.float64)
    wrong = torch.tensor([[ALWAYS, EVEN]] * 2, dtype=torch.float64)
    assert summarise(right, accepted, (1.0, 1.0))["ece"] == [0.0, 0.0]
    assert summarise(wrong, accepted, (1.0, 1.0))["ece"] == pytest.approx([0.5, 0.0])


def test_temperatures_change_the_calibrated_figures_only():
    logits = torch.tensor([[2.0]] * 4, dtype=torch.float64)
    figures = summarise(logits, torch.tensor([1, 1, 1, 0]), (2.0 / torch.log(torch.tensor(3.0)),))
    assert figures["ece"][0] == pytest.approx(1 / (1 + torch.e**-2.0) - 0.75)
    assert figures["ece_calibrated"][0] == pytest.approx(0, abs=1e-6)  # sigmoid(ln 3) = 3/4


def test_chance_error_shrinks_with_the_blocks_and_is_zero_for_certainties():
    few, many = (torch.full((n,), 0.5, dtype=torch.float64) for n in (100, 10_000))
    assert chance_error(few) == pytest.approx(0.04, rel=0.3)  # sqrt(2 / pi) * 0.5 / sqrt(100)
    assert chance_error(many) == pytest.approx(0.004, rel=0.3)
    assert chance_error(torch.ones(5, dtype=torch.float64)) == 0


def test_reliability_bins():
    predicted = torch.tensor([0.0, 0.02, 0.5, 1.0], dtype=torch.float64)
    bins = reliability(predicted, torch.tensor([False, True, True, True]))
    assert [tuple(b) for b in bins] == [
        (pytest.approx(0.01), 0.5, 2),
        (0.5, 1.0, 1),
        (1.0, 1.0, 1),
    ]


def test_held_out_prompts_are_different_texts():
    prompts = embedded.held_out()
    assert {kind: len(set(texts)) for kind, texts in prompts.items()} == {
        "terse code": 8,
        "typed code": 8,
        "prose": 8,
        "Chinese": 4,
    }
    assert all(380 <= len(text) <= 540 for texts in prompts.values() for text in texts)


@pytest.mark.parametrize("offset", range(overlap.WINDOW + 1))
def test_a_run_shared_with_the_corpus_is_found_at_every_offset(offset):
    """40 characters, and no shorter run, wherever they stand in either text."""
    run = "".join(chr(ord("A") + i) for i in range(overlap.WINDOW))
    prompt = ["~" * offset + run + "!"]
    text = "-" * offset + run
    assert overlap.shared_windows(prompt, [text]) == {run}
    assert overlap.shared_windows(prompt, [text[:-1] + "?", "-" + run[1:]]) == set()


@pytest.mark.deep
def test_no_prompt_is_in_the_training_data():
    prompts = [prompt for texts in embedded.held_out().values() for prompt in texts]
    assert overlap.shared_windows(prompts, (d.text for d in corpus.documents())) == set()
