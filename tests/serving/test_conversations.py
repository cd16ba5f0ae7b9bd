"""Conversations as clients send them: a sentence or an answer, the same in both modes."""

import json
from typing import Any, NamedTuple

import pytest
import requests
from serving.test_openai_client import MODES

pytestmark = pytest.mark.deep  # two servers of flags that no short test starts

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "Hi"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


# What is refused, and words of the sentence.
REFUSED = {
    "nothing": ([], "messages"),
    "system only": ([said("system", "Be brief.")], "messages[0].role"),
    "system last": ([USER, said("system", "Be brief.")], "messages[1].role"),
    "system behind a tool": (
        [USER, CALLING, said("tool", None), said("system", "Be brief.")],
        "messages[3].role",
    ),
    "null": ([said("user", None)], "messages[0].content"),
    "no parts": ([said("user", [])], "messages[0].content"),
    "empty developer": ([said("developer", "")], "messages[0].content"),
    "unknown role": ([said("robot", "Hi")], "messages[0].role"),
    "too many": ([USER, said("assistant", "Hi")] * 3000 + [USER], "context length"),
    "too long": ([said("user", "word " * 40_000)], "context length"),
}
ANSWERED = {
    "empty": [said("user", "")],
    "blank": [said("user", " ")],
    "empty part": [said("user", [{"type": "text", "text": ""}])],
    "tool without an answer": [USER, CALLING, said("tool", None)],
    "tool without a call": [USER, said("tool", "3")],
    "assistant twice": [USER, said("assistant", "a"), said("assistant", "b"), USER],
    "assistant last": [USER, said("assistant", "I am")],
    "many": [USER, said("assistant", "Hi")] * 20 + [USER],
    "NUL": [said("user", "a\0b")],
    "markers": [said("user", "a <|eos|> b <｜end▁of▁sentence｜> c </think>")],
    "every kind of character": [said("user", "é 好 🌧️ 👩‍🚀 \N{BYTE ORDER MARK} \u202e \r\n\t")],
}
CONTINUED = [USER, said("assistant", "The answer")]


class Outcome(NamedTuple):
    status: int
    text: str  # of the answer, or the sentence


@pytest.fixture(scope="module")
def servers(serving):
    return [serving(flags, env, preset="embedded") for flags, env in MODES.values()]


def talk(server, messages, stream: bool, **more) -> Outcome:
    body = {"model": "x", "messages": messages, "temperature": 0, "max_tokens": 8, "stream": stream}
    return send(server, json.dumps(body | {"ignore_eos": True} | more))


def send(server, body: str) -> Outcome:
    headers = {"Content-Type": "application/json"}
    url = f"{server.url}/v1/chat/completions"
    response = requests.post(url, data=body.encode(), headers=headers, timeout=300)
    if response.status_code != 200:
        return Outcome(response.status_code, response.json()["message"])
    if "event-stream" not in response.headers["Content-Type"]:
        return Outcome(200, response.json()["choices"][0]["message"]["content"] or "")
    lines = [line.removeprefix("data: ") for line in response.content.decode().split("\n") if line]
    assert lines.pop() == "[DONE]"
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    return Outcome(200, "".join(delta.get("content") or "" for delta in deltas))


def every_way(servers, messages, **more) -> Outcome:
    """The one outcome of both modes, whole and streamed."""
    (outcome,) = {
        talk(server, messages, stream, **more) for server in servers for stream in (False, True)
    }
    return outcome


@pytest.mark.parametrize("name", REFUSED)
def test_refused(servers, name):
    messages, words = REFUSED[name]
    status, sentence = every_way(servers, messages)
    assert status == 400
    assert words in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("name", ANSWERED)
def test_answered(servers, name):
    status, text = every_way(servers, ANSWERED[name])
    assert status == 200
    assert text


def test_an_answer_that_is_continued(servers):
    status, text = every_way(servers, CONTINUED, continue_final_message=True)
    assert status == 200
    assert text
    assert text != every_way(servers, CONTINUED).text


def test_half_a_character_is_no_json(servers):
    body = '{"model": "x", "messages": [{"role": "user", "content": "a \\ud83d b"}]}'
    (outcome,) = {send(server, body) for server in servers}
    assert outcome.status == 400


def test_no_prompt_says_none(servers):
    """A tool's null result and an assistant's null content are written as nothing."""
    for messages in (ANSWERED["tool without an answer"], [USER, CALLING, said("tool", ""), USER]):
        body = {"model": "x", "messages": messages}
        ids = servers[0].request("/v1/tokenize", body)["tokens"]
        text = servers[0].request("/v1/detokenize", {"model": "x", "tokens": ids})["text"]
        assert "None" not in text
        assert text.count("<｜Assistant｜>") == 2
