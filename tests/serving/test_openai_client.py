"""Every feature through the openai client: streamed or not, target-only or speculating, the same.

The trained checkpoint that ships with the package writes real text; grammars make it write what a
bigger model would, such as tool calls.
"""

import json
from typing import Any, NamedTuple

import openai
import pytest
from answers import ANSWERS
from serving.test_dspark_identity import FORCED
from serving.test_target_only import CHUNKED

MODES = {
    "target-only": (CHUNKED, ()),
    # Fewer events than tokens, so that a piece of text spans several steps.
    "dspark": ((*CHUNKED, "--speculative-algorithm", "dspark", "--stream-interval", "3"), FORCED),
}
QUESTION = [{"role": "user", "content": "Write a function that reads a file."}]
TOKENS = 48
GREEDY = {"temperature": 0, "max_tokens": TOKENS}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["苏州", "北京 🌧️"]},
        "tomorrow": {"type": "boolean"},
    },
    "required": ["city", "tomorrow"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": WEATHER},
}


class Choice(NamedTuple):
    text: str
    reasoning: str
    calls: list[tuple[str, str]]  # name, arguments
    finish: str | None
    logprobs: list[tuple[str, float]]


class Answer(NamedTuple):
    choices: list[Choice]
    tokens: int | None  # that the server counts


class Case(NamedTuple):
    wish: dict[str, Any]
    chat: bool = True


def chat(**wish: Any) -> Case:
    return Case({"messages": QUESTION} | GREEDY | wish)


def literally(text: str) -> dict[str, Any]:
    """A grammar that admits this text only."""
    special = "\\.^$*+?{}[]()|/\"'"
    escaped = "".join(f"\\{c}" if c in special else c for c in text)
    return {"regex": escaped.replace("\n", "\\n")}


CASES = {
    "chat": chat(),
    "completions": Case({"prompt": "def read(path):\n", **GREEDY}, chat=False),
    "completions, echo": Case({"prompt": "import os\n", "echo": True, **GREEDY}, chat=False),
    "completions, two prompts": Case({"prompt": ["def a", "class B"], **GREEDY}, chat=False),
    "n": chat(n=3),
    "log probabilities": chat(logprobs=True, top_logprobs=2),
    "completions, log probabilities": Case(
        {"prompt": "def read(path):\n", "logprobs": 2, **GREEDY}, chat=False
    ),
    "stop": chat(stop=["(", "\n\n"]),
    "max_tokens": chat(max_tokens=5),
    "max_completion_tokens": Case(
        {"messages": QUESTION, "temperature": 0, "max_completion_tokens": 7}
    ),
    "frequency penalty": chat(frequency_penalty=1.2),
    "presence penalty": chat(presence_penalty=1.5),
    "logit bias": chat(logit_bias={"11": -50, "300": 4}),
    "json_schema": chat(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "weather", "schema": WEATHER, "strict": True},
        }
    ),
    "tool, required": chat(tools=[TOOL], tool_choice="required", max_tokens=300),
    "tool, named": chat(
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=300,
    ),
    "tool, chosen by the model": chat(
        tools=[TOOL], max_tokens=300, extra_body=literally(ANSWERS["one call"])
    ),
    "tool, cut off": chat(tools=[TOOL], max_tokens=60, extra_body=literally(ANSWERS["one call"])),
    "text beside a tool": chat(tools=[TOOL], extra_body=literally("a < b <")),
    "reasoning": chat(extra_body={"chat_template_kwargs": {"thinking": True}}),
    "reasoning, ended": chat(extra_body=literally(ANSWERS["start and end"])),
    "reasoning, not streamed": chat(
        extra_body=literally(ANSWERS["start and end"]) | {"stream_reasoning": False}
    ),
    "Chinese and emoji": chat(max_tokens=200, extra_body={"regex": "[一-龥😀-🙏]{12}"}),
    "stop inside Chinese": chat(
        max_tokens=200, stop=["苏州"], extra_body=literally("你好，我在苏州 🌧️ 呢。")
    ),
}


@pytest.fixture(scope="module")
def client(serving):
    """Function (mode) -> openai client of a server."""

    def connect(mode: str) -> openai.OpenAI:
        flags, env = MODES[mode]
        server = serving(flags, env, preset="embedded")
        return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    return connect


def ask(client: openai.OpenAI, case: Case, stream: bool, **more: Any) -> Answer:
    wish = {"model": "default"} | case.wish
    wish["extra_body"] = wish.get("extra_body", {}) | more
    create = client.chat.completions.create if case.chat else client.completions.create
    if not stream:
        return whole(create(**wish))
    return joined(create(**wish, stream=True, stream_options={"include_usage": True}))


def whole(response) -> Answer:
    choices = []
    for choice in response.choices:
        if hasattr(choice, "text"):
            choices.append(Choice(choice.text, "", [], choice.finish_reason, scores(choice)))
            continue
        message = choice.message
        calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
        reasoning = getattr(message, "reasoning_content", None) or ""
        text = message.content or ""
        choices.append(Choice(text, reasoning, calls, choice.finish_reason, scores(choice)))
    return Answer(choices, response.usage.completion_tokens)


def joined(events) -> Answer:
    """What a client makes of the events."""
    choices: dict[int, Choice] = {}
    tokens = None
    for event in events:
        tokens = event.usage.completion_tokens if event.usage else tokens
        for part in event.choices:
            text, reasoning, calls, finish, logprobs = choices.get(
                part.index, Choice("", "", [], None, [])
            )
            delta = getattr(part, "delta", None)
            piece = part.text if delta is None else delta.content
            assert "\ufffd" not in (piece or ""), "a character was sent before it was complete"
            for call in getattr(delta, "tool_calls", None) or ():
                if call.function.name:
                    assert call.index == len(calls)
                    assert call.id
                    calls = [*calls, (call.function.name, "")]
                name, arguments = calls[call.index]
                arguments += call.function.arguments or ""
                calls = [*calls[:-1], (name, arguments)]
            choices[part.index] = Choice(
                text + (piece or ""),
                reasoning + (getattr(delta, "reasoning_content", None) or ""),
                calls,
                part.finish_reason or finish,
                logprobs + scores(part),
            )
    return Answer([choices[index] for index in sorted(choices)], tokens)


def scores(choice) -> list[tuple[str, float]]:
    """Tokens and their log probabilities."""
    found = getattr(choice, "logprobs", None)
    if found is None:
        return []
    if getattr(found, "content", None) is not None:
        return [(entry.token, entry.logprob) for entry in found.content]
    return list(zip(found.tokens, found.token_logprobs, strict=True))


@pytest.fixture(scope="module")
def reference(client):
    """What target-only answers when it does not stream."""
    target = client("target-only")
    return {name: ask(target, case, stream=False) for name, case in CASES.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_every_way_gives_the_same_answer(client, reference, mode, name, stream):
    assert ask(client(mode), CASES[name], stream) == reference[name]


def test_the_answers_are_what_was_asked_for(reference):
    def only(name: str) -> Choice:
        (choice,) = reference[name].choices
        return choice

    called = [("weather", '{"city": "苏州 🌧️", "days": 3}')]
    assert (only("chat").finish, reference["chat"].tokens) == ("length", TOKENS)
    assert only("completions, echo").text.startswith("import os\n")
    assert len(reference["completions, two prompts"].choices) == 2
    assert [choice.text for choice in reference["n"].choices] == [only("chat").text] * 3
    assert len(only("log probabilities").logprobs) == TOKENS
    assert only("stop").finish == "stop"
    assert only("chat").text.startswith(only("stop").text)
    assert reference["max_tokens"].tokens == 5
    assert reference["max_completion_tokens"].tokens == 7
    for changed in ("frequency penalty", "presence penalty", "logit bias"):
        assert only(changed).text != only("chat").text
    assert set(json.loads(only("json_schema").text)) == {"city", "tomorrow"}
    for name in ("tool, required", "tool, named"):
        ((function, arguments),) = only(name).calls[:1]
        assert function == "weather"
        assert json.loads(arguments)["city"] in WEATHER["properties"]["city"]["enum"]
        assert (only(name).text, only(name).finish) == ("", "tool_calls")
    chosen = only("tool, chosen by the model")
    assert (chosen.text, chosen.calls) == ("I look it up.", called)
    assert only("tool, cut off").finish == "length"
    assert only("text beside a tool").text == "a < b <"
    assert only("reasoning").reasoning
    assert not only("reasoning").text
    for name in ("reasoning, ended", "reasoning, not streamed"):
        assert (only(name).reasoning, only(name).text) == ("abc def", "normal text")
    assert len(only("Chinese and emoji").text) == 12
    assert only("stop inside Chinese").text == "你好，我在"


# Answers whose markers and characters a step cuts anywhere.
CUT = {
    "reasoning": chat(extra_body=literally(ANSWERS["start and end"])),
    "almost the end of reasoning": chat(
        extra_body=literally("<think>x<</think </thin</think>好<y")
    ),
    "tools": chat(tools=[TOOL], max_tokens=400, extra_body=literally(ANSWERS["two calls"])),
    "Chinese and emoji": CASES["Chinese and emoji"],
    "stop inside Chinese": CASES["stop inside Chinese"],
}


class Written(NamedTuple):
    answer: Answer
    prompt: list[int]
    ids: list[int]


@pytest.fixture(scope="module")
def written(client):
    """Each of CUT as target-only answers it, not streamed, and its token ids."""
    target = client("target-only")
    found = {}
    for name, case in CUT.items():
        extra = case.wish["extra_body"] | {"return_token_ids": True}
        response = target.chat.completions.create(
            model="default", **case.wish | {"extra_body": extra}
        )
        found[name] = whole(response), response.choices[0].token_ids
    return found


@pytest.mark.parametrize("draft", ["oracle", "wrong@1", "wrong@2", "wrong@3", "wrong@4", "random"])
@pytest.mark.parametrize("name", CUT)
def test_steps_of_any_length_give_the_same_deltas(client, written, name, draft):
    forced = {"draft": draft, "continuation": written[name].ids}
    answer = ask(client("dspark"), CUT[name], stream=True, custom_params=forced)
    assert answer == written[name].answer


@pytest.mark.parametrize("interval", [1, 3, 8])
@pytest.mark.parametrize("draft", ["oracle", "wrong@2"])
def test_events_end_between_characters(serving, written, interval, draft):
    """The native endpoint chooses its interval by request; each event carries the text so far."""
    flags, env = MODES["dspark"]
    server = serving(flags, env, preset="embedded")
    answer, prompt, ids = written["Chinese and emoji"]
    wish = CUT["Chinese and emoji"].wish
    sampling = {
        "regex": wish["extra_body"]["regex"],
        "stream_interval": interval,
        "custom_params": {"draft": draft, "continuation": ids},
        "ignore_eos": False,
    }
    texts = [event.text for event in server.stream(prompt, wish["max_tokens"], **sampling)]
    assert texts[-1] == answer.choices[0].text
    assert all(texts[-1].startswith(text) for text in texts)
    assert len(texts) > 3
