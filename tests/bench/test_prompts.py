"""Prompt sets: fixed, different from each other, and honest about what they are."""

import pytest

from dspark.bench.prompts import Bytes, PromptError, load_tokenizer, make_prompts
from dspark.target.checkpoint.tokenizer import write_tokenizer


@pytest.mark.parametrize("name", ["code", "prose", "synthetic"])
def test_sixteen_different_prompts_of_256_tokens(name):
    prompts = make_prompts(name, 16, 256, Bytes())
    assert {len(ids) for ids in prompts.ids} == {256}
    assert len({tuple(ids) for ids in prompts.ids}) == 16
    assert prompts.describe()["synthetic"] == (name == "synthetic")


def test_hashes_are_those_of_published_results():
    """A change of a text, of the cut or of the generator makes old results incomparable."""
    hashes = {
        name: make_prompts(name, 8, 256, Bytes()).sha256[:16]
        for name in ("code", "prose", "synthetic")
    }
    assert hashes == {
        "code": "dc5d3a73470bde10",
        "prose": "aedaaa27ee8292fd",
        "synthetic": "e1d731efc6ae06a5",
    }


def test_a_prompt_does_not_depend_on_how_many_are_asked_for():
    few, many = (make_prompts("prose", n, 64, Bytes()) for n in (2, 20))
    assert many.ids[:2] == few.ids


def test_texts_use_the_checkpoint_s_tokenizer(tmp_path):
    write_tokenizer(tmp_path, 300, 4096)
    prompts = make_prompts("code", 1, 32, load_tokenizer(tmp_path))
    # The test checkpoints have one id per byte, from 2 on.
    assert prompts.ids[0] == [b + 2 for b in make_prompts("code", 1, 32, Bytes()).ids[0]]
    assert prompts.tokenizer == "model"
    assert isinstance(load_tokenizer(tmp_path / "nothing"), Bytes)


def test_synthetic_ids_depend_on_the_seed_only():
    first, again, other = (make_prompts("synthetic", 2, 50, Bytes(), seed) for seed in (1, 1, 2))
    assert first == again
    assert first.sha256 != other.sha256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("poetry", 1, 8), "no prompt set 'poetry'"),
        (("code", 10_000, 256), "holds .* prompts of 256 tokens, not 10000"),
        (("code", 0, 256), "Cannot make 0 prompts"),
    ],
)
def test_impossible_requests_are_refused(arguments, message):
    with pytest.raises(PromptError, match=message):
        make_prompts(*arguments, Bytes())
