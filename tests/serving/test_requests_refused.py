"""Requests outside the table, through HTTP, in both modes: refused by name, and nobody is hurt.

Many of them once ended the server or were answered with status 500; SGLang still does so where a
request comes to it unchecked.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from serving.prompts import VOCAB, prompt
from serving.request_fuzz import Sent, ask, sentence
from serving.test_dspark_identity import FORCED, SPECULATE, TARGET
from serving.test_target_only import wait_idle

CONTROL = prompt(30, seed=98)
TOKENS = 24


def generate(**sampling) -> Sent:
    parameters = {"temperature": 0, "max_new_tokens": 4} | sampling
    return Sent("/generate", {"input_ids": [5, 6, 7], "sampling_params": parameters})


def native(**fields) -> Sent:
    return Sent("/generate", {"input_ids": [5, 6, 7]} | fields)


def chat(**fields) -> Sent:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    return Sent("/v1/chat/completions", body | fields)


def talk(*roles: str, **fields) -> Sent:
    return chat(messages=[{"role": role, "content": "x"} for role in roles], **fields)


BEFORE_START = [  # refused where the status of a stream is not sent yet
    (generate(sampling_seed=2**63), "sampling_seed"),
    (generate(sampling_seed=2**64), "sampling_seed"),
    (generate(sampling_seed="a"), "sampling_seed"),
    (generate(logit_bias={"7": 1e39}), "logit_bias"),
    (generate(logit_bias={"7": "x"}), "logit_bias"),
    (generate(logit_bias=[1]), "logit_bias"),
    (generate(logit_bias={str(VOCAB): 1}), "logit_bias"),
    (native(return_logprob=True, top_logprobs_num=VOCAB + 1), "top_logprobs_num"),
    (native(return_logprob=True, logprob_start_len=-7), "logprob_start_len"),
    (native(return_sampling_mask=True), "return_sampling_mask"),
    (generate(max_new_tokens=1.5), "max_new_tokens"),
    (native(input_ids=[[]]), "input_ids[0]"),
    (generate(skip_special_tokens="x"), "skip_special_tokens"),
    (generate(stop_token_ids=[VOCAB], min_new_tokens=3), "stop_token_ids[0]"),
    (generate(stop_token_ids=[-1], min_new_tokens=3), "stop_token_ids[0]"),
    (generate(n=10**6), "n must"),
    (generate(n=0), "n must"),
    (generate(n=-1), "n must"),
    (generate(n=1.5), "n must"),
    (generate(n="2"), "n must"),
    (generate(temperature="x"), "temperature"),
    (generate(temperature=[1]), "temperature"),
    (generate(top_p="0.5"), "top_p"),
    (generate(stop=5), "stop"),
    (generate(stop_regex="("), "stop_regex"),
    (generate(no_such_field=1), "no_such_field"),
    (generate(json_schema="[" * 100000), "json_schema"),
    (native(rid="HEALTH_CHECK_1"), "rid"),
]
REFUSED = [
    *BEFORE_START,
    (native(custom_logit_processor="x"), "custom"),  # one of the servers takes none at all
    (native(rid=["a"]), "rid"),
    (native(input_ids=[[5], [6]], multi_item_delimiter_indices=[[1]]), "multi_item"),
    (native(sampling_params=[{}]), "sampling_params"),
    (native(text="a"), "text and input_ids"),
    (chat(seed=2**63), "seed"),
    (chat(top_logprobs=VOCAB + 1, logprobs=True), "top_logprobs"),
    (chat(logit_bias={"7": "1"}), "logit_bias"),
    (chat(stop_token_ids=[VOCAB], min_tokens=2), "stop_token_ids[0]"),
    (chat(max_tokens="4"), "max_tokens"),
    (chat(response_format=5), "response_format"),
    (chat(messages=[]), "messages"),
    (chat(messages=[{"role": "user", "content": None}]), "messages[0].content"),
    (chat(messages=[{"role": "developer", "content": ""}]), "messages[0].content"),
    (talk("wizard"), "messages[0].role"),
    (talk("function"), "messages[0].role"),
    (talk("system"), "messages[0].role"),
    (talk("user", "system"), "messages[1].role"),
    (talk("user", "latest_reminder"), "messages[1].role"),
    (talk("assistant", continue_final_message=True), "messages"),
    (Sent("/v1/chat/completions", [1]), "JSON object"),
    (Sent("/v1/completions", {"prompt": "a", "n": 0}), "n must"),
    (Sent("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 0}), "logprobs"),
    (Sent("/v1/completions", {"prompt": [[1], []]}), "prompt[1]"),
    (Sent("/v1/detokenize", {"tokens": [-1]}), "tokens[0]"),
    (Sent("/v1/messages", {"messages": [{"role": "user"}], "max_tokens": 4}), "content"),
    (Sent("/api/generate", {"prompt": "a", "options": {"seed": "x"}}), "options.seed"),
    (Sent("/api/chat", {"model": "m", "messages": [{"role": "user", "content": "a"}]}), "template"),
    (Sent("/parse_function_call", {"text": "a", "tool_call_parser": "x"}), "tool_call_parser"),
    (Sent("/parse_function_call", {"text": "a"}), "tool_call_parser"),
    (Sent("/separate_reasoning", {"text": "a", "reasoning_parser": "x"}), "reasoning_parser"),
    (Sent("/separate_reasoning", {"text": 5, "reasoning_parser": "deepseek-v4"}), "text"),
    (Sent("/vertex_generate", {"instances": [], "parameters": {"x": 1}}), "parameters.x"),
    (Sent("/v1/responses", {"model": None, "input": "a"}), "model"),
    (Sent("/v1/embeddings", {"model": "m", "input": "a"}), "embeddings"),
    (Sent("/encode", {"text": "a"}), "embeddings"),
    (Sent("/classify", {"text": "a"}), "classes"),
]


@pytest.fixture(scope="module")
def servers(serving):
    return [serving(TARGET), serving(SPECULATE, FORCED)]


def check_refusal(url: str, request: Sent, named: str) -> None:
    answer = ask(url, request)
    assert 400 <= answer.status < 500, (request, answer)
    assert named in sentence(answer.said), (request, answer)


def test_refused_by_name_beside_others(servers):
    for server in servers:
        start = len(server.log())
        alone = server.generate(CONTROL, TOKENS).ids
        with ThreadPoolExecutor(1) as thread:
            meanwhile = thread.submit(server.generate, CONTROL, 8 * TOKENS)
            for request, named in REFUSED:
                check_refusal(server.url, request, named)
            assert meanwhile.result().ids[:TOKENS] == alone
        assert server.generate(CONTROL, TOKENS).ids == alone
        assert requests.get(f"{server.url}/health_generate", timeout=60).status_code == 200
        wait_idle(server)
        assert "Traceback" not in server.log()[start:]


def test_streams_are_refused_before_they_start(servers):
    for server in servers:
        for request, named in BEFORE_START:
            body = request.body | {"stream": True}
            response = requests.post(f"{server.url}/generate", json=body, timeout=60)
            assert response.status_code == 400
            assert named in sentence(response.json())


@pytest.mark.parametrize(
    "body",
    [b"{", b"null", b'"x"', b'{"text": "\\ud83d"}', b'{"text": NaN}', b"\xff", b""],
)
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/messages"])
def test_bodies_that_are_no_request(servers, path, body):
    for server in servers:
        headers = {"content-type": "application/json"}
        response = requests.post(server.url + path, data=body, headers=headers, timeout=60)
        assert response.status_code == 400
        assert len(sentence(response.json()).splitlines()) == 1


@pytest.mark.parametrize(
    "content",
    ["", " ", "\0", [{"type": "text", "text": ""}], "é" * 3000],
    ids=["empty", "blank", "nul", "parts", "long"],
)
def test_odd_messages_are_answered_alike(servers, content):
    messages = [{"role": "user", "content": content}]
    request = chat(messages=messages, temperature=0, ignore_eos=True)
    answers = [ask(server.url, request) for server in servers]
    assert [answer.status for answer in answers] in ([200, 200], [400, 400])
    texts = [answer.said.get("choices", [{}])[0].get("message") for answer in answers]
    assert texts[0] == texts[1]


def test_the_seed_of_ollama_is_taken(servers):
    body = {"model": "m", "prompt": "ab", "stream": False}
    request = Sent("/api/generate", body | {"options": {"seed": 3, "num_predict": 4}})
    assert [ask(server.url, request).status for server in servers] == [200, 200]


def test_a_stream_of_ollama_says_what_a_whole_answer_does(servers):
    """Failed before: the tokens of the last step were missing, with DSpark several."""
    options = {"temperature": 0, "num_predict": 7}
    body = {"model": "m", "prompt": "ab", "options": options}
    for server in servers:
        whole = ask(server.url, Sent("/api/generate", body | {"stream": False})).said["response"]
        events = ask(server.url, Sent("/api/generate", body | {"stream": True})).said
        assert whole == "".join(event["response"] for event in events)
        assert [event["done"] for event in events] == [False] * (len(events) - 1) + [True]
    assert whole


def test_log_probabilities_of_tokens_beside_a_request_without(servers):
    """The row of the other one is empty; taken for a tensor, it ended the server."""
    asked = [7, 9, 11]
    request = native(
        sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
        return_logprob=True,
        token_ids_logprob=asked,
    )
    for server in servers:
        alone = server.generate(CONTROL, TOKENS).ids
        with ThreadPoolExecutor(1) as thread:
            other = thread.submit(server.generate, CONTROL, 4 * TOKENS)
            answer = ask(server.url, request)
            assert other.result().ids[:TOKENS] == alone
        rows = answer.said["meta_info"]["output_token_ids_logprobs"]
        assert [[token for _, token, _ in row] for row in rows] == [asked] * 12
