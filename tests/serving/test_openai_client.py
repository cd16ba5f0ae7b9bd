"""Every feature through the openai client: streamed or not, target-only or speculating, the same.

The trained checkpoint that ships with the package writes real text; grammars make it write what a
bigger model would, such as tool calls.
"""

import functools
import importlib.util
import itertools
import json
import re
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import openai
import pytest
from answers import ANSWERS
from serving.test_dspark_identity import FORCED
from serving.test_target_only import CHUNKED
from transformers import AutoTokenizer

from dspark import embedded

pytestmark = pytest.mark.deep  # minutes: every feature, both modes, streamed and not

MODES = {
    "target-only": (CHUNKED, ()),
    # Fewer events than tokens, so that a piece of text spans several steps.
    "dspark": ((*CHUNKED, "--speculative-algorithm", "dspark", "--stream-interval", "3"), FORCED),
}
QUESTION = [{"role": "user", "content": "Write a function that reads a file."}]
TOKENS = 24
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
    "stop": chat(stop=["ost>", "\n\n"]),
    "max_tokens": chat(max_tokens=5),
    "max_completion_tokens": Case(
        {"messages": QUESTION, "temperature": 0, "max_completion_tokens": 7}
    ),
    "seed": chat(temperature=0.9, seed=7),
    "seed, n": chat(temperature=1.2, seed=7, n=3),
    "seed, top_p, top_k and min_p": chat(
        temperature=1, seed=8, top_p=0.9, extra_body={"top_k": 20, "min_p": 0.02}
    ),
    "completions, seed": Case(
        {"prompt": ["def a", "class B"], "temperature": 1, "max_tokens": TOKENS, "seed": 3},
        chat=False,
    ),
    "repetition penalty": chat(extra_body={"repetition_penalty": 1.3}),
    "frequency penalty": chat(frequency_penalty=1.2),
    "presence penalty": chat(presence_penalty=1.5),
    "logit bias": chat(logit_bias={"11": -50, "300": 4}),
    "json_schema": chat(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "weather", "schema": WEATHER, "strict": True},
        },
    ),
    "regex": chat(extra_body={"regex": "[a-f]{3,9}(-[0-9]{2}){2}"}),
    "grammar behind reasoning": chat(
        extra_body={"chat_template_kwargs": {"thinking": True}, "regex": "[0-9]{4}"}
    ),
    "grammar behind reasoning that ends": chat(
        messages=[{"role": "user", "content": "</think>\n" * 6}],  # which the model repeats
        extra_body={"chat_template_kwargs": {"thinking": True}, "regex": "[0-9]{4}"},
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
    "reasoning, ended": chat(max_tokens=60, extra_body=literally(ANSWERS["start and end"])),
    "reasoning, not streamed": chat(
        max_tokens=60, extra_body=literally(ANSWERS["start and end"]) | {"stream_reasoning": False}
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


Asked = dict[str, Future[Answer]]


def ask_all(client: openai.OpenAI, cases: dict[str, Case], stream: bool, **more: Any) -> Asked:
    """All at once: an answer does not depend on who else is asking."""
    with ThreadPoolExecutor(len(cases)) as threads:
        return {
            name: threads.submit(ask, client, case, stream, **more) for name, case in cases.items()
        }


@pytest.fixture(scope="module")
def answers(client):
    """Function (mode, stream) -> answers to CASES."""
    return functools.cache(lambda mode, stream: ask_all(client(mode), CASES, stream))


@pytest.fixture(scope="module")
def reference(answers) -> dict[str, Answer]:
    """What target-only answers when it does not stream."""
    return {name: job.result() for name, job in answers("target-only", False).items()}


WAYS = [
    pytest.param("dspark", True, id="dspark-streamed"),
    pytest.param("dspark", False, id="dspark-whole", marks=pytest.mark.deep),
    pytest.param("target-only", True, id="target-only-streamed", marks=pytest.mark.deep),
]


def without_scores(answer: Answer) -> Answer:
    return answer._replace(choices=[choice._replace(logprobs=[]) for choice in answer.choices])


@pytest.mark.parametrize(("mode", "stream"), WAYS)
@pytest.mark.parametrize("name", CASES)
def test_every_way_gives_the_same_answer(answers, reference, mode, name, stream):
    answer, right = answers(mode, stream)[name].result(), reference[name]
    assert without_scores(answer) == without_scores(right)
    for choice, other in zip(answer.choices, right.choices, strict=True):
        assert [token for token, _ in choice.logprobs] == [token for token, _ in other.logprobs]
        scores_of = [score for _, score in choice.logprobs]
        assert scores_of == pytest.approx([score for _, score in other.logprobs], abs=1e-4)


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
    for changed in ("seed", "frequency penalty", "presence penalty", "logit bias"):
        assert only(changed).text != only("chat").text
    assert len({choice.text for choice in reference["seed, n"].choices}) == 3
    assert re.fullmatch("[0-9]{4}", only("grammar behind reasoning that ends").text)
    assert re.fullmatch("[a-f]{3,9}(-[0-9]{2}){2}", only("regex").text)
    assert only("json_schema").text.split()[:2] == ["{", '"city"'], "cut off by the limit"
    ((function, arguments),) = only("tool, required").calls
    assert function == "weather"
    assert isinstance(json.loads(arguments), dict)
    assert (only("tool, required").text, only("tool, required").finish) == ("", "tool_calls")
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
    "reasoning": chat(max_tokens=60, extra_body=literally(ANSWERS["start and end"])),
    "almost the end of reasoning": chat(
        max_tokens=60,
        extra_body=literally("<think>x<</think </thin</think>好<y"),
    ),
    "tools": chat(tools=[TOOL], max_tokens=400, extra_body=literally(ANSWERS["two calls"])),
    "Chinese and emoji": CASES["Chinese and emoji"],
    "stop inside Chinese": CASES["stop inside Chinese"],
}


class Written(NamedTuple):
    answer: Answer
    ids: list[int]


@pytest.fixture(scope="module")
def written(client) -> dict[str, Written]:
    """Each of CUT as target-only answers it, not streamed, and its token ids."""
    target = client("target-only")
    found = {}
    for name, case in CUT.items():
        extra = case.wish["extra_body"] | {"return_token_ids": True}
        response = target.chat.completions.create(
            model="default", **case.wish | {"extra_body": extra}
        )
        found[name] = Written(whole(response), response.choices[0].token_ids)
    return found


DEEP_DRAFTS = [
    pytest.param(draft, marks=pytest.mark.deep)
    for draft in ("oracle", "wrong@1", "wrong@3", "wrong@4", "random")
]


@pytest.mark.parametrize("draft", ["wrong@2", *DEEP_DRAFTS])
def test_steps_of_any_length_give_the_same_deltas(client, written, draft):
    dspark = client("dspark")
    for name, case in CUT.items():
        forced = {"draft": draft, "continuation": written[name].ids}
        answer = ask(dspark, case, stream=True, custom_params=forced)
        assert answer == written[name].answer, name


@pytest.mark.parametrize(
    ("interval", "draft"),
    [
        (5, "oracle"),  # steps of six: every fifth would hit what SGLang waits for
        *(
            pytest.param(interval, draft, marks=pytest.mark.deep)
            for interval in (1, 3, 8)
            for draft in ("oracle", "wrong@2")
        ),
    ],
)
def test_no_step_jumps_over_an_event(serving, interval, draft):
    """Each event carries the text so far, and ends between characters."""
    prompt, tokens = "Write a function that reads a file.", 200
    sampling = {"regex": "[一-龥😀-🙏]{12}", "ignore_eos": False}
    flags, env = MODES["target-only"]
    truth = serving(flags, env, preset="embedded").generate(prompt, tokens, **sampling)
    flags, env = MODES["dspark"]
    server = serving(flags, env, preset="embedded")
    sampling |= {
        "stream_interval": interval,
        "custom_params": {"draft": draft, "continuation": truth.ids},
    }
    events = list(server.stream(prompt, tokens, **sampling))
    counts = [event.meta["completion_tokens"] for event in events]
    gaps = [end - start for start, end in itertools.pairwise(counts[:-1])]
    assert all(gap >= interval for gap in gaps)
    assert len(events) > 4
    final = events[-1].text
    assert final == truth.text
    assert all(final.startswith(event.text) for event in events)


@pytest.fixture(scope="module")
def native(serving):
    """Servers of both modes, for requests past the client."""
    return [serving(flags, env, preset="embedded") for flags, env in MODES.values()]


def every_way(native, prompt: str, tokens: int, **sampling: Any) -> set[str]:
    """Texts of both modes, whole and streamed, with drafts of the model and right ones."""
    target, dspark = native
    truth = target.generate(prompt, tokens, **sampling)
    right = {"custom_params": {"draft": "oracle", "continuation": truth.ids}}
    ways = [(target, {}), (dspark, {}), (dspark, right)]
    return {truth.text} | {
        text
        for server, more in ways
        for text in (
            server.generate(prompt, tokens, **sampling, **more).text,
            list(server.stream(prompt, tokens, **sampling, **more))[-1].text,
        )
    }


def test_answers_that_end_inside_a_character(native):
    """By the limit or by a stop token: the rest of the character is missing in every way alike."""
    prompt = "Write a function."
    rule = literally("🌧好é") | {"ignore_eos": False}
    ids = native[0].generate(prompt, 40, **rule).ids
    (whole,) = every_way(native, prompt, 40, **rule)
    assert whole == "🌧好é"
    for place, token in enumerate(ids[1:4], start=1):
        (cut,) = every_way(native, prompt, place, **rule)
        assert whole.startswith(cut.rstrip("\ufffd"))
        if token not in ids[:place]:
            (stopped,) = every_way(native, prompt, 40, **rule, stop_token_ids=[token])
            assert whole.startswith(stopped.rstrip("\ufffd"))


@pytest.mark.deep
def test_bytes_that_never_become_a_character(native):
    byte = AutoTokenizer.from_pretrained(embedded.checkpoint()).convert_tokens_to_ids("Ģ")  # 0x80
    (text,) = every_way(native, "Write a function.", 3000, logit_bias={str(byte): 1000})
    assert text == "\ufffd" * 3000


def test_responses(client):
    """Served where the package that SGLang needs for it is installed, and otherwise refused."""
    wish = {
        "model": "default",
        "input": "Write a function that reads a file.",
        "temperature": 0,
        "max_output_tokens": 24,
    }
    texts = set()
    for mode in MODES:
        responses = client(mode).responses
        if importlib.util.find_spec("openai_harmony") is None:
            with pytest.raises(openai.BadRequestError, match="openai-harmony"):
                responses.create(**wish)
            continue
        answer = responses.create(**wish)
        events = list(responses.create(**wish, stream=True))
        assert events[-1].type == "response.completed"
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(deltas) == answer.output_text
        assert answer.usage.output_tokens == 24
        texts.add(answer.output_text)
    assert len(texts) <= 1
    assert "" not in texts
