"""The test checkpoints' promise: `--acceptance` sets how many drafts the target accepts."""

import pytest
import torch
from greedy_steps import greedy_request
from local_speculation import Speculation

from dspark.target.checkpoint import presets
from dspark.target.checkpoint.make import ACCEPTANCE, make_checkpoint

PROMPT, STEPS = 40, 40


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Emitted tokens and accepted counts for each setting."""
    prompt = torch.randint(2, 511, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    results = {}
    for name in ("high", "medium", "low"):
        directory = tmp_path_factory.mktemp("acceptance") / name
        make_checkpoint(directory, presets.tiny(), alpha=ACCEPTANCE[name])
        results[name] = Speculation(directory).generate(prompt, STEPS)
    return results


def test_a_draft_that_was_not_asked_for_long_proposes_what_it_would_have(tmp_path):
    """Blocks in every step before, and none: the target's rows are all it goes by."""
    make_checkpoint(tmp_path / "model", presets.tiny(), alpha=ACCEPTANCE["medium"])
    prompt = torch.randint(2, 511, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    drafting, paused = (Speculation(tmp_path / "model", torch.bfloat16) for _ in range(2))
    emitted, accepted = drafting.generate(prompt, 12)
    paused.run(prompt, 0)
    paused.commit(PROMPT, 0)
    for n, token in enumerate(emitted[:-1]):
        paused.run([token], PROMPT + n)
        paused.commit(1, PROMPT + n)
    assert sum(accepted) > 5
    last = greedy_request(1, PROMPT + len(emitted) - 1, emitted[-1])
    expected, found = drafting.propose(last), paused.propose(last)
    assert found.tokens.equal(expected.tokens)
    assert found.confidence.equal(expected.confidence)


@pytest.mark.parametrize(
    ("name", "least", "most"), [("high", 3.0, 4.9), ("medium", 1.0, 2.5), ("low", 0.3, 1.2)]
)
def test_mean_accepted_drafts(runs, name, least, most):
    accepted = runs[name][1]
    assert least < sum(accepted) / len(accepted) < most


def test_every_accept_length_occurs(runs):
    assert {count for _, accepted in runs.values() for count in accepted} == {0, 1, 2, 3, 4, 5}


def test_sequences_stay_varied_and_never_end_by_themselves(runs):
    for emitted, _ in runs.values():
        assert not {0, 1, 511} & set(emitted)  # bos, eos, noise
        assert len(set(emitted)) > len(emitted) / 3
