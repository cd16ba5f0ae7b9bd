"""Requests for the fuzzer: every endpoint, valid ones and ones with a field gone wrong.

A request is a `Sent`: path, JSON body, and whether its answer is determined (greedy or seeded), so
that both modes must give it. Lengths stay small: `max_new_tokens` and its like are never left out,
and where they go wrong they do so in a way that is to be refused.
"""

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import requests
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from serving.prompts import VOCAB

from dspark.host.requests import table

TIMEOUT_S = 300
KEPT = {  # of an answer: what both modes must agree on
    *("text", "output_ids", "meta_info", "finish_reason", "prompt_tokens", "completion_tokens"),
    *("choices", "index", "message", "delta", "content", "usage", "tokens", "count", "scores"),
    *("response", "input_tokens", "output_tokens", "stop_reason", "type", "matched", "length"),
    *("predictions", "done_reason", "prompt_eval_count", "eval_count", "tool_calls"),
    *("output", "status", "reasoning_content", "stop_sequence"),
}
HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 1.0, 1.5, -0.5, 2**31, 2**63, 2**64, -(2**63) - 1, 1e39),
    *("", "x", "1", "true", "\0", "a" * 1000, "(", "<｜end▁of▁sentence｜>"),
    *([], [[]], [None], [1], [-1], [VOCAB], ["x", 1], [[1], [2.5]], {}, {"x": 1}, {"type": "x"}),
    *(
        {"7": 1e39},
        {"-1": 1},
        {"7": "x"},
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
    ),
]
HOSTILE_LENGTH: list[Any] = [-1, 1.5, 4.0, "4", True, [4], {}, 2**31, 2**63]
HOSTILE_CHOICES: list[Any] = [0, -1, 1.5, 2.0, "2", True, 129, 10**6, [2], 2]
LENGTHS = (
    *("max_new_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict"),
)


class Sent(NamedTuple):
    path: str
    body: Any
    determined: bool = True


token = st.integers(2, VOCAB - 1)
tokens = st.lists(token, min_size=1, max_size=40)
words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
length = st.integers(1, 8)
GREEDY = st.just(0) | st.just(0.0)
WARM = st.sampled_from([0.7, 1, 3.0])
SEEDS = st.sampled_from([0, 1, -1, 7, 2**32, 2**63 - 1, -(2**63)])

SAMPLING = {
    "top_p": st.sampled_from([1, 0.9, 0.1]),
    "top_k": st.sampled_from([-1, 1, 20]),
    "min_p": st.sampled_from([0, 0.1]),
    "frequency_penalty": st.sampled_from([0, 0.5, -2]),
    "presence_penalty": st.sampled_from([0, 1.5]),
    "repetition_penalty": st.sampled_from([1, 1.3]),
    "logit_bias": st.dictionaries(token.map(str), st.floats(-100, 100), max_size=3),
    "stop": words | st.lists(words, max_size=2),
    "stop_token_ids": st.lists(token, max_size=3),
    "stop_regex": st.sampled_from(["[a-z]+x", "\\d{2}"]),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "no_stop_trim": st.booleans(),
    "n": st.integers(1, 3),
}
GRAMMAR = st.fixed_dictionaries({"regex": st.sampled_from(["[ab]{3}", "x+"])})


def optional(fields: dict[str, SearchStrategy], most: int = 3) -> SearchStrategy[dict]:
    """At most `most` of the fields."""
    names = st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=most)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({n: fields[n] for n in chosen}))


def joined(*parts: SearchStrategy[dict]) -> SearchStrategy[dict]:
    return st.tuples(*parts).map(lambda dicts: {k: v for each in dicts for k, v in each.items()})


def always(**fields: SearchStrategy) -> SearchStrategy[dict]:
    return st.fixed_dictionaries(fields)


def choosing(seed: str) -> SearchStrategy[dict]:
    """Greedy, sampled with a seed, or seldom without."""
    seeded = st.fixed_dictionaries({"temperature": WARM, seed: SEEDS})
    return st.one_of(
        always(temperature=GREEDY), always(temperature=GREEDY), seeded, seeded, seeded,
        always(temperature=WARM),
    )  # fmt: skip


sampling = joined(
    choosing("sampling_seed"),
    always(max_new_tokens=length),
    optional(SAMPLING | {"min_new_tokens": st.just(1)}),
    st.just({}) | GRAMMAR,
)
one_prompt = always(input_ids=tokens) | always(text=words)
prompts = always(input_ids=st.lists(tokens, min_size=1, max_size=3))
generate = joined(
    one_prompt | prompts,
    always(sampling_params=sampling),
    optional(
        {
            "stream": st.booleans(),
            "return_logprob": st.booleans(),
            "top_logprobs_num": st.integers(0, 3),
            "logprob_start_len": st.sampled_from([-1, 0]),
            "token_ids_logprob": st.lists(token, min_size=1, max_size=2),
            "return_text_in_logprobs": st.booleans(),
        }
    ),
)
openai = joined(choosing("seed"), always(model=st.just("m"), max_tokens=length), optional(SAMPLING))
completion = joined(
    openai,
    always(prompt=tokens | words | st.lists(words, min_size=1, max_size=2)),
    optional({"stream": st.booleans(), "echo": st.booleans(), "logprobs": st.integers(0, 3)}),
)
user = always(role=st.sampled_from(["user", "developer"]), content=words)
earlier = always(role=st.sampled_from(["system", "user", "assistant", "tool"]), content=words)
messages = st.tuples(st.lists(earlier, max_size=3), user).map(lambda pair: [*pair[0], pair[1]])
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
chat = joined(
    openai,
    always(messages=messages),
    optional(
        {
            "stream": st.booleans(),
            "logprobs": st.booleans(),
            "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
            "tools": st.just([TOOL]),
            "chat_template_kwargs": st.fixed_dictionaries({"thinking": st.booleans()}),
            "continue_final_message": st.booleans(),
        }
    ),
)
anthropic = joined(
    always(
        model=st.just("m"),
        messages=st.lists(always(role=st.just("user"), content=words), min_size=1, max_size=2),
    ),
    optional({"system": words}),
)
ollama = always(
    model=st.just("m"),
    stream=st.booleans(),
    options=joined(choosing("seed"), always(num_predict=length)),
)
responses = joined(
    always(
        model=st.just("m"),
        temperature=GREEDY,
        max_output_tokens=st.integers(4, 8),  # two of them are kept back
        input=words | st.lists(always(role=st.just("user"), content=words), min_size=1, max_size=2),
    ),
    optional({"stream": st.booleans(), "instructions": words, "stop": words, "top_k": token}),
)

VALID: dict[str, SearchStrategy[dict]] = {
    "/generate": generate,
    "/v1/completions": completion,
    "/v1/chat/completions": chat,
    "/invocations": chat,
    "/v1/responses": responses,
    "/v1/messages": joined(
        anthropic,
        always(temperature=GREEDY, max_tokens=length),
        optional({"stream": st.booleans()}),
    ),
    "/v1/messages/count_tokens": anthropic,
    "/api/generate": joined(ollama, always(prompt=words)),
    "/api/chat": joined(ollama, always(messages=messages)),
    "/vertex_generate": always(
        instances=st.lists(always(input_ids=tokens), min_size=1, max_size=2),
        parameters=always(sampling_params=sampling),
    ),
    "/v1/tokenize": always(prompt=words) | always(messages=messages),
    "/v1/detokenize": always(tokens=tokens | st.lists(tokens, min_size=1, max_size=2)),
    "/v1/score": always(
        query=words, items=st.lists(words, min_size=1, max_size=2), label_token_ids=tokens
    ),
    "/encode": always(text=words),
    "/classify": always(text=words),
    "/v1/embeddings": always(input=words),
    "/v1/classify": always(input=words),
    "/v1/rerank": always(query=words, documents=st.lists(words)),
}
FIELDS = {  # that may be added, beyond those of a valid request
    "/generate": table.GENERATE,
    "/v1/completions": table.COMPLETION,
    "/v1/chat/completions": table.CHAT,
    "/invocations": table.CHAT,
    "/v1/responses": table.RESPONSES,
    "/v1/messages": table.ANTHROPIC,
    "/v1/messages/count_tokens": table.COUNT_TOKENS,
    "/api/generate": table.OLLAMA_GENERATE,
    "/api/chat": table.OLLAMA_CHAT,
    "/vertex_generate": table.VERTEX,
    "/v1/tokenize": table.TOKENIZE,
    "/v1/detokenize": table.DETOKENIZE,
    "/v1/score": table.SCORE,
}
NESTED = {"sampling_params": table.SAMPLING_PARAMS, "options": table.OLLAMA_OPTIONS}


@st.composite
def spoiled(draw, body: dict, known) -> Any:
    """The body with one field, at any depth, replaced, added or left out."""
    choices = sorted({*body, *known} - set(LENGTHS) | {"no_such_field"} | {*LENGTHS} & {*body})
    name = draw(st.sampled_from(choices))
    inside = body.get(name)
    if isinstance(inside, dict) and draw(st.booleans()):
        return body | {name: draw(spoiled(inside, NESTED.get(name, inside)))}
    if isinstance(inside, list) and inside and isinstance(inside[-1], dict) and draw(st.booleans()):
        return body | {name: [*inside[:-1], draw(spoiled(inside[-1], inside[-1]))]}
    if isinstance(inside, list) and inside and draw(st.booleans()):
        return body | {name: [*inside, draw(st.sampled_from(HOSTILE))]}
    if name in LENGTHS:
        return body | {name: draw(st.sampled_from(HOSTILE_LENGTH))}
    if name == "n":
        return body | {name: draw(st.sampled_from(HOSTILE_CHOICES))}
    if name in ("sampling_params", "parameters", "options"):  # null would lift the length
        return body | {name: draw(st.sampled_from(["x", 5, [5], 1.5, True]))}
    if name in body and draw(st.integers(0, 4)) == 0:
        return {key: value for key, value in body.items() if key != name}
    return body | {name: draw(st.sampled_from(HOSTILE))}


NOT_DRAWN = ("/v1/tokenize", "/v1/detokenize", "/v1/score", "/v1/messages/count_tokens")
SEED_OF = {"/generate": "sampling_seed", "/vertex_generate": "sampling_seed"} | dict.fromkeys(
    ("/v1/completions", "/v1/chat/completions", "/invocations", "/api/generate", "/api/chat"),
    "seed",
)


def is_determined(path: str, body: Any) -> bool:
    """Whether nothing is left to chance: temperature 0, or a seed where the endpoint takes one."""
    if path in NOT_DRAWN or not isinstance(body, dict):
        return True
    places = [body, body.get("sampling_params"), body.get("options"), body.get("parameters")]
    if isinstance(body.get("parameters"), dict):
        places.append(body["parameters"].get("sampling_params"))
    said = [place for place in places if isinstance(place, dict) and "temperature" in place]
    return bool(said) and all(
        (type(place["temperature"]) in (int, float) and place["temperature"] == 0)
        or type(place.get(SEED_OF.get(path))) is int
        for place in said
    )


@st.composite
def sent(draw) -> Sent:
    """One request: valid, or spoiled once or twice."""
    path = draw(st.sampled_from(["/generate", "/v1/chat/completions", "/v1/completions", *VALID]))
    body = draw(VALID[path])
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        body = draw(spoiled(body, FIELDS.get(path, ())))
    return Sent(path, body, is_determined(path, body))


class Answer(NamedTuple):
    status: int
    said: Any  # JSON, or the list of a stream's events
    streamed: bool = False


STREAMS = ("text/event-stream", "application/x-ndjson")


def ask(url: str, request: Sent) -> Answer:
    response = requests.post(url + request.path, json=request.body, timeout=TIMEOUT_S)
    if not response.headers.get("content-type", "").startswith(STREAMS):
        return Answer(response.status_code, response.json())
    lines = [line.removeprefix("data: ") for line in response.text.split("\n")]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    for event in events:
        if event.get("error"):  # a stream that was refused after its status was sent
            return Answer(event["error"]["code"], event)
    return Answer(response.status_code, events, streamed=True)


class Score(float):
    """A probability, equal up to the last bits of its logarithm.

    Where a request samples, target-only computes log probabilities by another formula.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and math.isclose(self, other, rel_tol=1e-4, abs_tol=1e-6)

    __hash__ = float.__hash__


def gist(said: Any) -> Any:
    """What both modes must agree on: no ids, times or counters of drafts."""
    if isinstance(said, float):
        return Score(said)
    if isinstance(said, dict):
        return {key: gist(value) for key, value in said.items() if key in KEPT}
    return [gist(each) for each in said] if isinstance(said, list) else said


def stream_gist(events: list[dict]) -> Any:
    """What a stream says of each choice, however it was cut: text, token ids, end."""
    texts: dict[int, str] = {}
    ends: dict[int, Any] = {}
    for event in events:
        for choice in event.get("choices", [event]):
            index = choice.get("index", 0)
            if "meta_info" in choice:  # /generate repeats what came before
                texts[index] = choice.get("text", "")
                end = choice["meta_info"]["finish_reason"], choice.get("output_ids")
            else:
                texts[index] = texts.get(index, "") + piece_of(choice)
                end = choice.get("finish_reason") or choice.get("done_reason")
            if isinstance(choice.get("response"), dict):  # /v1/responses ends with the whole
                end = gist(choice["response"])
            ends[index] = end or ends.get(index)
    return texts, ends


def piece_of(choice: dict) -> str:
    """The text that an event adds to its choice."""
    delta = choice.get("delta", choice.get("message", choice))
    if isinstance(delta, str):  # /v1/responses
        return delta
    pieces = [delta.get(name) for name in ("reasoning_content", "text", "content", "response")]
    return "".join(piece for piece in pieces if isinstance(piece, str))


def agreed(answer: Answer, determined: bool) -> Any:
    """What both modes must have in common."""
    if answer.status != 200 or not determined:
        return answer.status
    shorten: Callable = stream_gist if answer.streamed else gist
    return answer.status, shorten(answer.said)


def sentence(said: Any) -> str:
    """The message of a refusal, wherever the endpoint puts it."""
    error = said.get("error", said) if isinstance(said, dict) else {}
    return error.get("message", "") if isinstance(error, dict) else str(error)
