"""A seed means the same tokens: without and with DSpark, whatever is drafted, alone or in company,
in chunks, after a retraction."""

import json

import pytest
import requests
from serving import request_fuzz
from serving.request_fuzz import Sent, stream_gist
from serving.test_dspark_ends import interrupted
from serving.test_dspark_identity import FORCED, PROMPTS, SPECULATE, TARGET
from serving.test_dspark_requests import ask, finish

TOKENS = 24
LONG = PROMPTS[-1]  # several chunks

WISHES = {
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 3.0},
    "top-k": {"temperature": 2.0, "top_k": 8},
    "top-p": {"temperature": 2.0, "top_p": 0.7},
    "min-p": {"temperature": 2.0, "min_p": 0.1},
    "all cuts": {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "bias": {"temperature": 2.0, "logit_bias": {"7": 4.0, "9": -6.0}},
    "frequency": {"temperature": 2.0, "frequency_penalty": 0.7},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    "grammar": {"temperature": 2.0, "regex": "[ab]{12}", "ignore_eos": False},
    "json": {
        "temperature": 1.0,
        "json_schema": json.dumps({"enum": ["red", "green"]}),
        "ignore_eos": False,
    },
    "least length": {
        "temperature": 1.0,
        "min_new_tokens": 15,
        "stop_token_ids": list(range(2, 200)),
        "ignore_eos": False,
    },
}
NAMES = list(WISHES)


def rules(name: str, **more):
    plain = {"ignore_eos": True, "max_new_tokens": TOKENS, "sampling_seed": 7}
    return plain | WISHES[name] | more


def prompt_of(name: str) -> list[int]:
    return PROMPTS[NAMES.index(name) % 5]


def together(server, **more):
    """Every kind of request in one batch, and what each answers."""
    body = {
        "input_ids": [prompt_of(name) for name in NAMES],
        "sampling_params": [rules(name, **more) for name in NAMES],
    }
    return dict(zip(NAMES, finish(server.request("/generate", body)), strict=True))


@pytest.fixture(scope="module")
def target(serving):
    return serving(TARGET)


@pytest.fixture(scope="module")
def server(serving):
    return serving(SPECULATE, FORCED)


@pytest.fixture(scope="module")
def truth(target):
    """What the target says to every kind of request, in company."""
    return together(target)


def test_both_modes_in_company(server, truth):
    assert together(server) == truth


@pytest.mark.parametrize("mode", ["target", "server"])
@pytest.mark.parametrize("name", ["plain", "all cuts", "grammar"])
def test_alone(request, mode, name, truth):
    one = request.getfixturevalue(mode)
    assert finish(ask(one, [prompt_of(name)], **rules(name))) == [truth[name]]


@pytest.mark.parametrize("kind", ["oracle", "wrong", "wrong@2", "random"])
def test_drafts_do_not_matter(server, truth, kind):
    body = {
        "input_ids": [prompt_of(name) for name in NAMES],
        "sampling_params": [
            rules(name, custom_params={"draft": kind, "continuation": truth[name][0]})
            for name in NAMES
        ],
    }
    answers = server.request("/generate", body)
    assert finish(answers) == [truth[name] for name in NAMES]
    if kind == "oracle":  # the drafts are accepted, for they are what the target draws
        steps = answers[NAMES.index("plain")]["meta_info"]["spec_verify_ct"]
        assert steps < TOKENS - 1


@pytest.mark.parametrize("name", ["plain", "all cuts", "frequency"])
@pytest.mark.parametrize("events", [1, 3])
def test_a_retraction_goes_on_with_the_same_stream(target, server, truth, name, events):
    for one in (target, server):
        answer = interrupted(one, prompt_of(name), events, **rules(name))
        assert answer["output_ids"] == truth[name][0]
        assert answer["meta_info"]["num_retractions"] >= 1


def test_a_prompt_in_chunks(target, server):
    sampled = {"temperature": 2.0, "sampling_seed": -3, "top_p": 0.95}
    theirs = finish(ask(target, [LONG], **sampled))
    assert finish(ask(server, [LONG], **sampled)) == theirs
    assert finish(ask(server, [LONG, *PROMPTS[:3]], **sampled))[:1] == theirs


def test_every_seed_of_64_bits(target, server):
    said = set()
    for seed in (-(2**63), -1, 0, 1, 2**32, 2**63 - 1):
        sampled = {"temperature": 3.0, "sampling_seed": seed}
        theirs = finish(ask(target, PROMPTS[2:3], **sampled))
        assert finish(ask(server, PROMPTS[2:3], **sampled)) == theirs
        said.add(tuple(theirs[0][0]))
    assert len(said) == 6


def test_log_probabilities_of_sampled_tokens(target, server):
    sampled = {"temperature": 2.0, "sampling_seed": 11, "top_k": 20}
    wish = {"return_logprob": True, "top_logprobs_num": 2}
    ours = ask(server, PROMPTS[:4], wish, **sampled)
    theirs = ask(target, PROMPTS[:4], wish, **sampled)
    assert finish(ours) == finish(theirs)
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert [a["meta_info"][name] for a in ours] == [a["meta_info"][name] for a in theirs]


def test_seeded_unseeded_and_greedy_requests_share_a_batch(target, server):
    plain = {"ignore_eos": True, "max_new_tokens": TOKENS}
    kinds = [
        plain | {"temperature": 2.0, "sampling_seed": 5},
        plain | {"temperature": 2.0},
        plain | {"temperature": 0},
        plain | {"temperature": 2.0, "top_k": 3},
        plain | {"temperature": 2.0, "sampling_seed": 6, "top_p": 0.8},
    ] * 4
    prompts = (PROMPTS[:5] * 4)[: len(kinds)]
    answers = server.request("/generate", {"input_ids": prompts, "sampling_params": kinds})
    for i in (0, 2, 4):
        expected = ask(target, [prompts[i]], **kinds[i])[0]["output_ids"]
        for j in range(i, len(kinds), 5):
            assert answers[j]["output_ids"] == expected
    free = {tuple(answers[j]["output_ids"]) for j in range(1, len(kinds), 5)}
    assert len(free) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_choices_differ_and_come_again(target, server, stream):
    """Failed before: one text `n` times."""

    def choices(one, **sampling):
        parameters = {"ignore_eos": True, "max_new_tokens": 12, "n": 4} | sampling
        body = {"input_ids": PROMPTS[2], "sampling_params": parameters, "stream": stream}
        if not stream:
            return [a["output_ids"] for a in one.request("/generate", body)]
        found: dict[int, list[int]] = {}
        with requests.post(f"{one.url}/generate", json=body, stream=True, timeout=600) as lines:
            for line in lines.iter_lines():
                event = line.removeprefix(b"data: ")
                if event and event != b"[DONE]":
                    answer = json.loads(event)
                    found[answer["index"]] = answer["output_ids"]
        return [found[i] for i in range(4)]

    seeded = {"temperature": 3.0, "sampling_seed": 7}
    first = choices(target, **seeded)
    assert len({tuple(ids) for ids in first}) == 4
    assert choices(target, **seeded) == first
    for _ in range(2):
        assert choices(server, **seeded) == first
    single = ask(server, [PROMPTS[2]], max_new_tokens=12, **seeded)[0]["output_ids"]
    assert single == first[0]
    assert len({tuple(ids) for ids in choices(server, temperature=3.0)}) == 4
    assert len({tuple(ids) for ids in choices(server, temperature=0)}) == 1


def test_choices_of_several_prompts(target, server):
    body = {
        "input_ids": PROMPTS[2:4],
        "sampling_params": {
            "ignore_eos": True, "max_new_tokens": 12, "n": 2, "temperature": 3.0,
            "sampling_seed": 7,
        },
    }  # fmt: skip
    theirs = [a["output_ids"] for a in target.request("/generate", body)]
    assert [a["output_ids"] for a in server.request("/generate", body)] == theirs
    assert len({tuple(ids) for ids in theirs}) == 4


CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}], "n": 4})
TWO_PROMPTS = ("/v1/completions", {"prompt": PROMPTS[2:4], "n": 2})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "wish"), [CHAT, TWO_PROMPTS], ids=["chat", "completions"])
def test_choices_of_the_openai_endpoints(target, server, path, wish, stream):
    """Four choices: seeded ones differ and come again in both modes, greedy ones do not differ."""

    def choices(one, **sampling) -> list[str]:
        body = {"model": "m", "max_tokens": 12, "ignore_eos": True} | wish | sampling
        if not stream:
            answer = request_fuzz.ask(one.url, Sent(path, body)).said
            assert answer["usage"]["completion_tokens"] == 4 * 12
            return [c.get("text") or c["message"]["content"] for c in answer["choices"]]
        counted = {"stream": True, "stream_options": {"include_usage": True}}
        events = request_fuzz.ask(one.url, Sent(path, body | counted)).said
        assert events[-1]["usage"]["completion_tokens"] == 4 * 12
        texts, _ = stream_gist([event for event in events if event["choices"]])
        return [texts[i] for i in range(4)]

    seeded = {"temperature": 3.0, "seed": 7}
    first = choices(target, **seeded)
    assert len(set(first)) == 4
    for one in (target, server, server):
        assert choices(one, **seeded) == first
    assert len(set(choices(server, temperature=3.0))) == 4
    greedy = choices(server, temperature=0)
    assert greedy == choices(target, temperature=0)
    assert len(set(greedy)) == len(wish.get("prompt", [0]))
