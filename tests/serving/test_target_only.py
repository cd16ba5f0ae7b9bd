"""The same prompt gives the same tokens, however the server comes to compute them."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from serving.prompts import MIXED, NEW_TOKENS, prompt

CHUNKED = ("--chunked-prefill-size", "256")
WHOLE = ("--chunked-prefill-size", "-1", "--disable-radix-cache")
RETRACTING = (("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", "5"))
PROMPTS = list(MIXED.values())


def ids(outputs) -> list[list[int]]:
    return [output.ids for output in outputs]


def wait_idle(server, seconds: float = 60) -> dict:
    """Load report once nothing runs or waits; what the last request held has been returned."""
    deadline = time.monotonic() + seconds
    while True:
        load = server.load()
        if load["num_running_reqs"] == load["num_waiting_reqs"] == load["num_used_tokens"] == 0:
            return load
        assert time.monotonic() < deadline, load
        time.sleep(0.2)


@pytest.fixture(scope="module")
def chunked(serving):
    return serving(CHUNKED)


@pytest.fixture(scope="module")
def alone(chunked):
    """Every prompt on its own, nothing cached: what all other ways are compared with."""
    chunked.flush_cache()
    return [chunked.generate(p, NEW_TOKENS).ids for p in PROMPTS]


def test_outputs_differ_between_prompts(alone):
    """Otherwise the comparisons below would show nothing."""
    assert all(len(out) == NEW_TOKENS for out in alone)
    assert len({tuple(out) for out in alone}) == len(PROMPTS)
    assert len({token for out in alone for token in out}) > 2 * NEW_TOKENS


def test_cached_prefix(chunked, alone):
    repeated = [chunked.generate(p, NEW_TOKENS) for p in PROMPTS]
    assert ids(repeated) == alone
    cached = {len(p): out.meta["cached_tokens"] for p, out in zip(PROMPTS, repeated, strict=True)}
    assert cached == {1: 0, 5: 0, 64: 0, 127: 0, 130: 0, 257: 256, 300: 256, 520: 512}


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_mixed_batch(chunked, alone, reverse):
    order = list(reversed(range(len(PROMPTS)))) if reverse else list(range(len(PROMPTS)))
    chunked.flush_cache()
    together = chunked.generate_concurrently([PROMPTS[i] for i in order], [NEW_TOKENS] * len(order))
    assert ids(together) == [alone[i] for i in order]


def test_one_request_with_many_prompts(chunked, alone):
    assert ids(chunked.generate_batch(PROMPTS, NEW_TOKENS)) == alone


def test_staggered_lengths(chunked, alone):
    """Requests leave the batch one by one; those that stay must not notice."""
    lengths = [1 + i for i in range(len(PROMPTS))]
    outputs = chunked.generate_concurrently(PROMPTS, lengths)
    assert ids(outputs) == [out[:n] for out, n in zip(alone, lengths, strict=True)]


def test_after_abort(chunked, alone):
    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(chunked.generate, prompt(300, 9), 2000, "to-abort")
        while chunked.load()["num_running_reqs"] == 0:
            time.sleep(0.05)
        chunked.abort("to-abort")
        aborted = job.result()
    assert aborted.meta["finish_reason"]["type"] == "abort"
    assert len(aborted.ids) < 2000
    wait_idle(chunked)
    assert ids(chunked.generate_batch(PROMPTS, NEW_TOKENS)) == alone


def test_decode_equals_prefill(chunked):
    """A long decode crosses the window, every compress boundary and two pages; continuing from a
    fresh prefill of what it wrote so far gives the same tokens."""
    start = prompt(40, seed=40)
    written = chunked.generate(start, 480).ids
    for done in (1, 87, 100, 215, 216, 217, 300, 472):
        chunked.flush_cache()
        resumed = chunked.generate(start + written[:done], 4).ids
        assert resumed == written[done : done + 4], f"after {done} tokens"


def test_pools_return_to_their_start(chunked):
    start = wait_idle(chunked)
    chunked.generate_concurrently(PROMPTS, [NEW_TOKENS] * len(PROMPTS))
    assert wait_idle(chunked)["num_used_tokens"] == start["num_used_tokens"] == 0
    chunked.flush_cache()
    assert "leak" not in chunked.log().lower()
    assert "Traceback" not in chunked.log()


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([], "empty"),
        ([5, 512], "input_ids[1] must be a token id of the vocabulary, from 0 to 511, not 512."),
        ([-1], "input_ids[0] must be a token id of the vocabulary, from 0 to 511, not -1."),
        ([7] * 5000, "longer than the model's context length"),
    ],
    ids=["empty", "above", "negative", "too-long"],
)
def test_bad_prompts_are_refused_and_the_server_lives(chunked, alone, tokens, said):
    with pytest.raises(requests.HTTPError) as error:
        chunked.generate(tokens, 4)
    assert error.value.response.status_code == 400
    assert said in error.value.response.text
    assert chunked.generate(PROMPTS[1], NEW_TOKENS).ids == alone[1]


def test_bad_prompt_inside_a_batch_spares_the_server(chunked, alone):
    with pytest.raises(requests.HTTPError):
        chunked.generate_batch([PROMPTS[1], [600]], 4)
    assert chunked.generate(PROMPTS[1], NEW_TOKENS).ids == alone[1]


def test_other_inputs_than_tokens_are_refused(chunked):
    body = {"input_embeds": [[0.0] * 128], "sampling_params": {"max_new_tokens": 2}}
    with pytest.raises(requests.HTTPError) as error:
        chunked.request("/generate", body)
    assert error.value.response.status_code == 400


def test_whole_prompts_without_prefix_cache(serving, alone):
    server = serving(WHOLE)
    assert ids(server.generate_batch(PROMPTS, NEW_TOKENS)) == alone
    assert ids([server.generate(p, NEW_TOKENS) for p in PROMPTS[-3:]]) == alone[-3:]
    wait_idle(server)


def test_forced_retraction(serving, alone):
    server = serving(CHUNKED, RETRACTING)
    outputs = server.generate_concurrently(PROMPTS, [NEW_TOKENS] * len(PROMPTS))
    assert ids(outputs) == alone
    assert sum(output.meta["num_retractions"] for output in outputs) > 0
    wait_idle(server)
    assert server.alive()
