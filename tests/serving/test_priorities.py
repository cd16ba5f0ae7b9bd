"""An urgent request takes the place of a running one, which later goes on as if it had not."""

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from serving.prompts import prompt
from serving.test_dspark_ends import summary
from serving.test_dspark_identity import FORCED
from serving.test_target_only import CHUNKED, wait_idle

PLACES = ("--enable-priority-scheduling", "--max-running-requests", "2")
MODES = {
    "target-only": ((*CHUNKED, *PLACES), ()),
    "dspark": ((*CHUNKED, *PLACES, "--speculative-algorithm", "dspark"), FORCED),
}
TOKENS = 100
FIRST, SECOND = prompt(40, seed=43), prompt(70, seed=44)
URGENT = [(prompt(30, seed=41), 12), (prompt(600, seed=42), 6)]
# Two that fill both places, and the priority that each names.
VICTIMS = {
    "plain": ((FIRST, {}, 0), (SECOND, {}, 0)),
    "grammar": ((FIRST, {"regex": "[ab]{60}", "ignore_eos": False}, 0), (SECOND, {}, None)),
    "penalties": (
        (FIRST, {"frequency_penalty": 0.6}, 0),
        (SECOND, {"repetition_penalty": 1.3, "presence_penalty": 0.5}, 1),
    ),
    "seeded": (
        (FIRST, {"temperature": 2.0, "sampling_seed": 5}, 0),
        (SECOND, {"temperature": 1.0, "sampling_seed": 6, "top_p": 0.9}, 0),
    ),
    "a long prompt": ((FIRST, {}, 0), (prompt(1500, seed=45), {}, 0)),
}


@pytest.fixture(scope="module", params=MODES)
def server(request, serving):
    flags, env = MODES[request.param]
    return serving(flags, env)


@pytest.fixture(scope="module")
def alone(serving) -> Callable[[list[int], int, dict], tuple]:
    """What target-only says to a request on its own."""
    target = serving(*MODES["target-only"])
    known: dict[str, tuple] = {}

    def answer(ids: list[int], tokens: int, rules: dict) -> tuple:
        key = json.dumps([ids, tokens, rules])
        if key not in known:
            known[key] = summary(target.request("/generate", body(ids, tokens, rules)))
        return known[key]

    return answer


def body(ids: list[int], tokens: int, rules: dict, priority: int | None = None) -> dict:
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens} | rules,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "priority": priority,
    }


def stream(server, wish: dict, events: int = 0, then: Callable[[], None] = lambda: None) -> dict:
    """The last event; `then` is called behind so many of them. None repeats another."""
    last: dict = {"output_ids": []}
    url = f"{server.url}/generate"
    with requests.post(url, json=wish | {"stream": True}, stream=True, timeout=600) as answer:
        lines = (line.removeprefix(b"data: ") for line in answer.iter_lines())
        for seen, line in enumerate(line for line in lines if line.startswith(b"{")):
            before = len(last["output_ids"])
            last = json.loads(line)
            assert len(last["output_ids"]) > before
            if seen + 1 == events:
                then()
    return last


@pytest.mark.parametrize("name", VICTIMS)
def test_the_one_that_makes_room_loses_nothing(server, alone, name):
    events = random.Random(name).randint(1, 9)
    first, second = (body(ids, TOKENS, rules, rank) for ids, rules, rank in VICTIMS[name])
    with ThreadPoolExecutor(3) as threads:
        urgent = []

        def hurry() -> None:
            for ids, tokens in URGENT:
                wish = body(ids, tokens, {}, priority=100)
                urgent.append(threads.submit(server.request, "/generate", wish))

        other = threads.submit(stream, server, second)
        answers = [stream(server, first, events, hurry), other.result()]
        hurried = [job.result() for job in urgent]
    assert [summary(a) for a in hurried] == [alone(ids, tokens, {}) for ids, tokens in URGENT]
    expected = [alone(ids, TOKENS, rules) for ids, rules, _ in VICTIMS[name]]
    assert [summary(a) for a in answers] == expected
    assert sum(a["meta_info"]["num_retractions"] for a in answers) >= 1
    assert wait_idle(server)["num_used_tokens"] == 0
    assert "Traceback" not in server.log()
