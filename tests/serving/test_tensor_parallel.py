"""Two and four ranks over gloo: the target's tokens, few bytes, and a rank at fault is named."""

import shutil

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from serving.prompts import MIXED, prompt
from serving.test_dspark_configurations import DSPARK, check
from serving.test_dspark_identity import FORCED
from serving.test_target_only import CHUNKED, ids

from dspark.commands.local_server import LocalServer, ServerFailed
from dspark.target.checkpoint import presets
from dspark.target.checkpoint.reader import Checkpoint
from dspark.target.config import ModelConfig

PROMPTS = [MIXED[length] for length in (5, 127, 130, 300)]
TOKENS = 20


def flags(ranks: int) -> tuple[str, ...]:
    return (*CHUNKED, "--tp-size", str(ranks))


def test_two_ranks(serving):
    """The two-rank target is the truth here, for greedy and for seeded requests."""
    sampled = {"temperature": 3.0, "sampling_seed": 7, "top_k": 40}
    target = serving(flags(2), preset="tiny-tp2")
    truth = ids(target.generate_batch(PROMPTS, TOKENS))
    drawn = ids(target.generate_batch(PROMPTS, TOKENS, **sampled))
    server = serving((*flags(2), *DSPARK), FORCED, preset="tiny-tp2")
    check(server, truth, prompts=PROMPTS)
    assert server.generate(PROMPTS[1], TOKENS, **sampled).ids == drawn[1]
    assert ids(server.generate_batch(PROMPTS, TOKENS, **sampled)) == drawn
    free = ids(server.generate_batch(PROMPTS, TOKENS, temperature=3.0))
    assert [len(out) for out in free] == [TOKENS] * len(PROMPTS)


def bytes_a_step(server, **wish) -> dict[str, float]:
    """What rank 0 receives in a step of one request whose drafts are all wrong."""

    def received(tokens: int) -> dict[str, int]:
        before = server.info()["internal_states"][0]["dspark"]["bytes_from_other_ranks"]
        server.flush_cache()
        parameters = wish | {"custom_params": {"draft": "wrong", "continuation": [0] * tokens}}
        assert len(server.generate(prompt(40, seed=5), tokens, **parameters).ids) == tokens
        server.flush_cache()  # waits for the step in flight
        after = server.info()["internal_states"][0]["dspark"]["bytes_from_other_ranks"]
        return {name: count - before.get(name, 0) for name, count in after.items()}

    short, long = received(5), received(13)  # the prompt and the step in flight cancel out
    return {name: (long[name] - short.get(name, 0)) / 8 for name in long}


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_a_step(serving, ranks):
    """Six verify rows and five draft rows: slices of sums, 8 bytes a row for a greedy choice."""
    preset = f"tiny-tp{ranks}"
    config = ModelConfig.from_hf(presets.PRESETS[preset]())
    server = serving((*flags(ranks), *DSPARK), FORCED, preset=preset)
    others, row = ranks - 1, 2 * config.hidden_size
    verify, block = 6, config.dspark.block_size
    sums = 1 + 2 * config.num_hidden_layers, 1 + 2 * config.dspark.stages
    greedy = bytes_a_step(server)
    assert greedy["sum"] == 2 * others * row / ranks * (sums[0] * verify + sums[1] * block)
    assert greedy["argmax"] == 8 * others * (verify + block)
    assert greedy["decisions"] == 8 * others
    assert greedy.get("logits", 0) == 0
    # A bias has to be added to the logits of all columns.
    biased = bytes_a_step(server, logit_bias={"3": -1.0})
    assert biased["logits"] == 4 * verify * config.vocab_size * others / ranks
    assert biased["argmax"] == 8 * others * block


def ends_with(server, sentence: str) -> None:
    """The server must end by itself, with `sentence` in its log."""
    server.process.wait(60)
    assert sentence in server.log()


def test_a_rank_that_decides_otherwise_ends_the_server(serving):
    server = serving((*flags(2), *DSPARK), FORCED, preset="tiny-tp2")
    truth = server.generate(PROMPTS[0], TOKENS).ids
    wish = {"draft": "wrong", "continuation": truth, "only_rank": 1}
    with pytest.raises(requests.RequestException):
        server.generate(PROMPTS[0], TOKENS, custom_params=wish)
    ends_with(server, "Rank 1 decided on other tokens than the other ranks")


@pytest.mark.deep
def test_logits_broken_on_one_rank_end_the_server(checkpoint, tmp_path):
    """The second half of the vocabulary head is NaN, which only rank 1 reads."""
    directory = tmp_path / "broken"
    shutil.copytree(checkpoint("none", "tiny-tp2"), directory)
    shard = directory / Checkpoint(directory).shard_of["head.weight"]
    tensors = load_file(shard)
    head = tensors["head.weight"]
    head[len(head) // 2 :] = torch.nan
    save_file(tensors, shard)
    log = tmp_path / "log"
    with (
        pytest.raises((ServerFailed, requests.RequestException)),
        LocalServer(directory, (*flags(2), *DSPARK), log=log) as server,
    ):
        server.generate(PROMPTS[0], TOKENS)  # unless it has ended over its own warm-up request
    assert "Rank 1 computed logits that are not numbers, and no other rank did" in log.read_text()
