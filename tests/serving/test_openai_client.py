"""Every feature through the openai client: streamed or not, target-only or speculating, the same.

The trained checkpoint that ships with the package writes real text; grammars make it write what a
bigger model would, such as tool calls.
"""

import functools
import itertools
import json
import re
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import openai
import pytest
import requests
from answers import ANSWERS
from serving.openai_requests import Answer, Case, Choice, ask, literally, whole
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
STRICT_TOOL = {"type": "function", "function": TOOL["function"] | {"strict": True}}
TOKENIZER = AutoTokenizer.from_pretrained(embedded.checkpoint())
# Where the schema allows blanks, so small a model writes nothing else.
NO_BLANKS = {str(n): -100 for n in range(len(TOKENIZER)) if TOKENIZER.decode([n]).isspace()}


def chat(**wish: Any) -> Case:
    return Case({"messages": QUESTION} | GREEDY | wish)


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
    "logit bias": chat(logit_bias={"65": -100, "300": 4}),  # 65 begins the answer without it
    "min_tokens": chat(extra_body={"stop_token_ids": [65], "min_tokens": 9}),
    "stop token": chat(extra_body={"stop_token_ids": [803]}),  # " file"
    "json_object": chat(response_format={"type": "json_object"}),
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
    "tool, strict": chat(
        tools=[STRICT_TOOL], tool_choice="required", max_tokens=300, logit_bias=NO_BLANKS
    ),
    "tools, none": chat(tools=[TOOL], tool_choice="none"),
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


@pytest.mark.parametrize(("mode", "stream"), WAYS)
@pytest.mark.parametrize("name", CASES)
def test_every_way_gives_the_same_answer(answers, reference, mode, name, stream):
    assert answers(mode, stream)[name].result() == reference[name]


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
    assert reference["min_tokens"].tokens >= 9
    assert only("stop token").text == "` is a"
    assert only("stop token").finish == "stop"
    assert only("json_object").text.lstrip().startswith("{")
    for changed in ("seed", "frequency penalty", "presence penalty", "logit bias"):
        assert only(changed).text != only("chat").text
    assert len({choice.text for choice in reference["seed, n"].choices}) == 3
    assert re.fullmatch("[0-9]{4}", only("grammar behind reasoning that ends").text)
    assert re.fullmatch("[a-f]{3,9}(-[0-9]{2}){2}", only("regex").text)
    assert only("json_schema").text.split()[:2] == ["{", '"city"'], "cut off by the limit"
    ((function, arguments),) = only("tool, required").calls
    assert function == "weather"
    assert isinstance(json.loads(arguments), dict), "of any shape: the tool is not strict"
    ((function, arguments),) = only("tool, strict").calls
    assert function == "weather"
    assert json.loads(arguments)["city"] in WEATHER["properties"]["city"]["enum"]
    assert json.loads(arguments)["tomorrow"] in (True, False)
    assert only("tools, none").calls == []
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
    assert len(events) >= 4
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
    texts = {truth.text}
    for server, more in [(target, {}), (dspark, {}), (dspark, right)]:
        whole = server.generate(prompt, tokens, **sampling, **more)
        events = list(server.stream(prompt, tokens, **sampling, **more))
        assert whole.ids == events[-1].ids == truth.ids
        assert all(events[-1].text.startswith(event.text) for event in events)
        texts |= {whole.text, events[-1].text}
    return texts


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


def test_answers_aborted_inside_a_character(native):
    """The last event says what all its tokens say."""
    byte = TOKENIZER.convert_tokens_to_ids("é".encode().decode("latin-1")[0])
    for server in native:
        events = []
        for event in server.stream("Write a function.", 2000, logit_bias={str(byte): 1000}):
            events.append(event)
            if len(events) == 3:
                server.abort(event.meta["id"])
        last = events[-1]
        assert last.meta["finish_reason"]["type"] == "abort"
        assert 0 < len(last.ids) < 2000
        assert last.text == TOKENIZER.decode(last.ids)


@pytest.mark.parametrize("skip", [False, True])
def test_special_tokens_between_bytes_of_characters(native, skip):
    bos, *bytes_of_rain = TOKENIZER.convert_tokens_to_ids(["<|bos|>", "ð", "Ł", "Į", "§"])
    bias = {str(token): 60 for token in (bos, *bytes_of_rain)}
    sampling = {"logit_bias": bias, "frequency_penalty": 2.0, "skip_special_tokens": skip}
    ids = native[0].generate("Write a function.", 60, **sampling).ids
    assert {bos, *bytes_of_rain} <= set(ids)
    (text,) = every_way(native, "Write a function.", 60, **sampling)
    assert text == TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert ("<|bos|>" in text) == (not skip)


def test_prompts_of_every_kind_of_text(native):
    every_way(native, "é 好 🌧️ 👩\u200d🚀 <|bos|>\ufeff\0 ＡＢ <｜User｜>", 12)
    for prompt, said in (("", "empty"), ("x" * 20_000, "context length")):
        for server in native:
            with pytest.raises(requests.HTTPError) as error:
                server.generate(prompt, 4)
            assert error.value.response.status_code == 400
            assert said in error.value.response.text


def test_bytes_that_never_become_a_character(native):
    byte = TOKENIZER.convert_tokens_to_ids("Ģ")  # 0x80
    right = {"draft": "oracle", "continuation": [byte] * 3000}
    for server, more in zip(native, ({}, {"custom_params": right}), strict=True):
        sent = list(server.stream("Write a function.", 3000, logit_bias={str(byte): 1000}, **more))
        assert sent[-1].text == "\ufffd" * 3000
        assert all(len(event.text) >= len(event.ids) - 1 for event in sent), "none waits for long"


HELD_BACK = 2  # tokens of a response's limit that SGLang keeps for markers
RESPONSES = {
    "text": {"input": "Write a function that reads a file."},  # ends in `<`
    "cut off": {"input": "Write a function that reads a file.", "max_output_tokens": 7},
}


@pytest.mark.parametrize("wish", RESPONSES.values(), ids=RESPONSES)
def test_responses(client, wish):
    wish = {"model": "default", "temperature": 0, "max_output_tokens": 24} | wish
    texts = set()
    for mode in MODES:
        responses = client(mode).responses
        answer = responses.create(**wish)
        events = list(responses.create(**wish, stream=True))
        assert events[-1].type == "response.completed"
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(deltas) == answer.output_text == events[-1].response.output_text
        tokens = wish["max_output_tokens"] - HELD_BACK
        assert answer.usage.output_tokens == tokens
        assert answer.usage == events[-1].response.usage == responses.retrieve(answer.id).usage
        texts.add(answer.output_text)
    assert len(texts) == 1
    assert "" not in texts


def test_models(client):
    for mode in MODES:
        (model,) = client(mode).models.list().data
        assert (model.id, model.object) == (str(embedded.checkpoint()), "model")
        assert client(mode).models.retrieve(model.id).id == model.id
        with pytest.raises(openai.NotFoundError):
            client(mode).models.retrieve("another")


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"temperature": 3e39}, "temperature"),
        ({"max_tokens": 10**9}, "context length"),
        ({"n": 0}, "n must be"),
        ({"messages": []}, "messages"),
        ({"top_logprobs": 3000, "logprobs": True}, "top_logprobs"),
        ({"logit_bias": {"2048": 1}}, "logit_bias"),
        ({"tool_choice": "required"}, "tool"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused_is_an_exception_of_the_client(client, wish, said, stream):
    for mode in MODES:
        with pytest.raises(openai.BadRequestError, match=said):
            ask(client(mode), chat(**wish), stream)


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_does_not_compile_is_an_exception_of_the_client(client, stream):
    """In a stream, which has begun when a worker sees the grammar, one without a status."""
    kind = openai.APIError if stream else openai.BadRequestError
    for mode in MODES:
        with pytest.raises(kind, match="regex"):
            ask(client(mode), chat(extra_body={"regex": "["}), stream)
