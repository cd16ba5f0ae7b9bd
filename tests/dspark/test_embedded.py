"""The checkpoint that ships with the package: complete, small, and able to write Python."""

import ast
import hashlib

import torch
from local_speculation import Speculation
from tokenizers import Tokenizer

from dspark import embedded
from dspark.bench.local_target import LocalTarget, Rows
from dspark.speculation import calibration, step_cost
from dspark.target.config import ModelConfig
from dspark.target.weights import load_draft, load_target

LIMIT = 14_000_000  # bytes in the repository
PROMPT = "import os\nimport sys\n\n\ndef main(argv):\n"


def test_it_is_small_enough_to_ship():
    size = sum(f.stat().st_size for f in embedded.DIRECTORY.rglob("*") if f.suffix != ".pyc")
    assert size <= LIMIT


def test_it_has_every_layer_kind_and_three_stages():
    config = ModelConfig.from_checkpoint(embedded.checkpoint())
    assert set(config.compress_ratios) == {0, 4, 128}
    assert config.dspark is not None
    assert (config.dspark.stages, config.dspark.block_size) == (3, 5)
    draft = load_draft(embedded.checkpoint(), config)  # every tensor exactly once, or an error
    assert draft.markov_w1.shape == (config.vocab_size, config.dspark.markov_rank)


def test_it_continues_python_with_python():
    config = ModelConfig.from_checkpoint(embedded.checkpoint())
    target = LocalTarget(load_target(embedded.checkpoint(), config), config, max_tokens=256)
    tokenizer = Tokenizer.from_file(str(embedded.checkpoint() / "tokenizer.json"))
    ids = tokenizer.encode(PROMPT).ids
    text = tokenizer.decode(target.greedy(ids, 40))
    function = text.split("\n\n")[1]  # the first complete one
    assert isinstance(ast.parse(function).body[0], ast.FunctionDef)


def test_its_text_is_far_more_likely_than_chance():
    """Held out by construction: this file did not exist when the model was trained."""
    config = ModelConfig.from_checkpoint(embedded.checkpoint())
    target = LocalTarget(load_target(embedded.checkpoint(), config), config, max_tokens=512)
    tokenizer = Tokenizer.from_file(str(embedded.checkpoint() / "tokenizer.json"))
    with open(__file__) as source:
        ids = tokenizer.encode(source.read()).ids[:400]
    out = target.forward([Rows(0, 0, ids)], store_all=False)
    scores = target.logits(out.hidden[:-1]).log_softmax(-1)
    loss = -scores.gather(1, torch.tensor(ids[1:])[:, None]).mean()
    assert loss < 4.0  # nats a token; chance is ln 2048 = 7.6


def test_speculation_emits_what_the_target_alone_emits_in_fewer_steps():
    """On text it was not trained on, in served precision."""
    tokenizer = Tokenizer.from_file(str(embedded.checkpoint() / "tokenizer.json"))
    prompt = tokenizer.encode(embedded.held_out()["typed code"][0]).ids
    speculation = Speculation(embedded.checkpoint(), torch.bfloat16)
    emitted, accepted = speculation.generate(prompt, 20)
    config = speculation.config
    alone = LocalTarget(speculation.target.weights, config, max_tokens=512)
    assert alone.greedy(prompt, len(emitted)) == emitted
    assert len(emitted) == 1 + 20 + sum(accepted)
    assert sum(accepted) >= 20  # random weights accept next to nothing


def test_model_card_names_the_files_that_ship():
    card = (embedded.DIRECTORY / "MODEL_CARD.md").read_text()
    for file in embedded.checkpoint().iterdir():
        if file.suffix == ".safetensors" or file.name in ("config.json", "tokenizer.json"):
            assert f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" in card


def test_its_confidence_calibration_loads():
    fitted = calibration.load(embedded.calibration(), gamma=5)
    assert len(fitted.temperatures) == 5
    assert all(
        after <= before for after, before in zip(fitted.ece_after, fitted.ece_before, strict=True)
    )


def test_its_step_cost_table_loads_and_grows_with_the_rows():
    cost = step_cost.load(embedded.step_cost())
    assert [steps.requests for steps in cost] == [1, 2, 4, 8]
    for steps in cost:
        assert (steps.rows[0], steps.rows[-1]) == (steps.requests, 6 * steps.requests)
        assert steps.seconds[0] < steps.seconds[-1]
