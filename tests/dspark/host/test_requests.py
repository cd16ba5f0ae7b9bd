"""The table of request fields: what it knows, what it refuses, and the sentence it says."""

import dataclasses
import pkgutil
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from dspark.host.requests import conversation, door, rules, table
from dspark.host.requests.rules import Model, Outside

V = 512
MODEL = Model(vocab_size=V)
WRITTEN_BY_SGLANG = {
    "is_normalized",
    "stop_regex_max_len",
    "stop_regex_strs",
    "stop_str_max_len",
    "stop_strs",
}


def sentence(endpoint: str, body: object) -> str:
    with pytest.raises(Outside) as caught:
        door.check_body(endpoint, body, MODEL)
    return str(caught.value)


def chat(**fields) -> dict:
    return {"messages": [{"role": "user", "content": "hello"}]} | fields


@pytest.mark.parametrize(
    ("known", "schema"),
    [
        (table.COMPLETION, "openai.protocol.CompletionRequest"),
        (table.CHAT, "openai.protocol.ChatCompletionRequest"),
        (table.RESPONSES, "openai.protocol.ResponsesRequest"),
        (table.TOKENIZE, "openai.protocol.TokenizeRequest"),
        (table.DETOKENIZE, "openai.protocol.DetokenizeRequest"),
        (table.SCORE, "openai.protocol.ScoringRequest"),
        (table.ANTHROPIC, "anthropic.protocol.AnthropicMessagesRequest"),
        (table.COUNT_TOKENS, "anthropic.protocol.AnthropicCountTokensRequest"),
        (table.OLLAMA_CHAT, "ollama.protocol.OllamaChatRequest"),
        (table.OLLAMA_GENERATE, "ollama.protocol.OllamaGenerateRequest"),
    ],
)
def test_table_knows_every_field_of_a_schema(known, schema):
    fields = pkgutil.resolve_name(f"sglang.srt.entrypoints.{schema}").model_fields
    assert set(known) == set(fields)


def test_table_knows_every_field_that_reaches_a_worker():
    assert set(table.GENERATE) == {f.name for f in dataclasses.fields(GenerateReqInput)}
    assert set(table.SAMPLING_PARAMS) == set(SamplingParams.__struct_fields__) - WRITTEN_BY_SGLANG


def test_every_endpoint_of_the_table_is_one_of_sglang():
    from sglang.srt.entrypoints.http_server import app

    assert set(table.ENDPOINTS) <= {r.name for r in app.routes if hasattr(r, "name")}


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"sampling_seed": 2**63}, "sampling_seed must be an integer from -9223372036854775808"),
        ({"sampling_seed": 2.0**64}, "sampling_seed"),
        ({"sampling_seed": "a"}, 'sampling_seed .* not "a"'),
        ({"logit_bias": {"7": 1e39}}, "logit_bias.7 .* not 1e[+]39"),
        ({"logit_bias": {"7": "1"}}, "logit_bias.7"),
        ({"logit_bias": {str(V): 1}}, "logit_bias .* from 0 to 511"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"07": 1}}, "logit_bias"),
        ({"logit_bias": {"٧": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias must be a JSON object"),
        ({"max_new_tokens": 1.5}, "max_new_tokens .* not 1.5"),
        ({"max_new_tokens": 1.0}, "max_new_tokens .* not 1.0"),
        ({"max_new_tokens": True}, "max_new_tokens .* not true"),
        ({"skip_special_tokens": "x"}, "skip_special_tokens must be true or false"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"stop_token_ids": [V], "min_new_tokens": 3}, r"stop_token_ids\[0\] .* not 512"),
        ({"stop_token_ids": [3, -1]}, r"stop_token_ids\[1\] .* not -1"),
        ({"stop_token_ids": [None]}, r"stop_token_ids\[0\] .* not null"),
        ({"n": 10**6}, "n must be an integer from 1 to 128"),
        ({"n": 0}, "n must"),
        ({"n": -1}, "n must"),
        ({"n": 1.5}, "n must"),
        ({"n": "2"}, "n must"),
        ({"temperature": "x"}, "temperature must be a number"),
        ({"temperature": [1]}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": False}, "temperature .* not false"),
        ({"top_p": "0.5"}, "top_p"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"repetition_penalty": 1e-30}, "repetition_penalty"),
        ({"stop": 5}, "stop must be a string"),
        ({"stop": ["a", ""]}, r"stop\[1\]"),
        ({"stop_regex": "("}, "stop_regex must be a regular expression"),
        ({"regex": "(" * 200}, "regex must not nest"),
        ({"json_schema": {}}, "json_schema must be a string"),
        ({"custom_params": {"a": [[1]]}}, r"custom_params.\"a\"\[0\]"),
        ({"nonsense": 1}, "nonsense is not a field"),
    ],
)
def test_sampling_parameters(parameters, named):
    body = {"input_ids": [5], "sampling_params": parameters}
    with pytest.raises(Outside, match=named):
        door.check_body("generate_request", body, MODEL)
    with pytest.raises(Outside, match=named):  # the same without HTTP
        door.check_generate(GenerateReqInput(**body), MODEL)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input_ids": [[]]}, "input_ids[0] must not be empty."),
        ({"input_ids": []}, "input_ids must not be empty."),
        ({"input_ids": [[1], 2]}, "input_ids[1] must be a list of token ids, not 2."),
        ({"input_ids": [1, [2]]}, "input_ids[1] must be a token id"),
        ({"input_ids": [1, True]}, "input_ids[1] must be a token id"),
        ({"input_ids": [V]}, "input_ids[0] must be a token id of the vocabulary, from 0 to 511"),
        ({"text": []}, "text must not be empty."),
        ({"text": ["a", 5]}, "text[1] must be a string, not 5."),
        ({"text": "a\ud83d"}, "text must be text that can be written as UTF-8."),
        ({"logprob_start_len": -7}, "logprob_start_len must be an integer from -1"),
        ({"top_logprobs_num": V + 1}, "top_logprobs_num must be an integer from 0 to 512"),
        ({"token_ids_logprob": [-1]}, "token_ids_logprob[0] must be a token id"),
        ({"rid": ""}, "rid must be a string of at least one character"),
        ({"rid": "HEALTH_CHECK_1"}, "rid must not begin with HEALTH_CHECK."),
        ({"lora_path": "x"}, "lora_path is not served"),
        ({"image_data": "x"}, "image_data is not served"),
        ({"input_embeds": [[0.5]]}, "input_embeds is not served"),
        ({"stream": "yes"}, 'stream must be true or false, not "yes".'),
        ({"priority": "high"}, "priority must be an integer"),
        ({"session_params": {"x": 1}}, "session_params.x is not a field"),
    ],
)
def test_fields_beside_the_sampling_parameters(fields, named):
    assert sentence("generate_request", fields).startswith(named)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "text or input_ids is missing."),
        ({"text": "a", "input_ids": [1]}, "text and input_ids must not both be given."),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params must not be a list"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params must have one item"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid must have one item for each of the 2"),
        ({"input_ids": [1], "rid": ["a"]}, "rid must not be a list"),
        ({"input_ids": [1], "token_ids_logprob": [[1]]}, "token_ids_logprob must not be a list"),
    ],
)
def test_fields_that_do_not_fit_each_other(fields, named):
    with pytest.raises(Outside) as caught:
        door.check_generate(GenerateReqInput(**fields), MODEL)
    assert str(caught.value).startswith(named)


def test_embeddings_are_refused():
    with pytest.raises(Outside, match="no embeddings"):
        door.check_generate(EmbeddingReqInput(text="a"), MODEL)


@pytest.mark.parametrize(
    ("endpoint", "body", "named"),
    [
        ("openai_v1_chat_completions", [], "The request must be a JSON object, not []."),
        ("openai_v1_chat_completions", {}, "messages is missing."),
        ("v1_responses_request", {"input": "a", "model": None}, "model is missing."),
        ("openai_v1_chat_completions", chat(seed=2**63), "seed must be an integer"),
        ("openai_v1_chat_completions", chat(top_logprobs=V + 1), "top_logprobs must be"),
        ("openai_v1_chat_completions", chat(max_tokens=0), "max_tokens must be an integer from 1"),
        ("openai_v1_chat_completions", chat(temperature="0.5"), "temperature must be a number"),
        ("openai_v1_chat_completions", chat(response_format=5), "response_format must be a JSON"),
        ("openai_v1_chat_completions", chat(tools=[{}]), "tools[0].function is missing."),
        ("openai_v1_completions", {"prompt": [1, "a"]}, "prompt[1] must be a token id"),
        ("openai_v1_completions", {"prompt": 5}, "prompt must be a string, not 5."),
        ("openai_v1_completions", {"prompt": "a", "n": 2.0}, "n must be an integer"),
        ("openai_v1_detokenize", {"tokens": [-1]}, "tokens[0] must be a token id"),
        ("ollama_generate", {"options": {"num_predict": "4"}}, "options.num_predict must be"),
        ("anthropic_v1_messages", {"messages": [], "max_tokens": 4}, "messages must not be empty."),
        ("vertex_generate", {"parameters": {"foo": 1}}, "parameters.foo is not a field"),
        ("encode_request", {"text": "a"}, "This server generates text; it computes no embeddings."),
    ],
)
def test_other_endpoints(endpoint, body, named):
    assert sentence(endpoint, body).startswith(named)


def test_null_is_as_good_as_absent():
    fields = dict.fromkeys(table.SAMPLING_PARAMS)
    request = GenerateReqInput(text=["a", "b"], sampling_params=fields)
    door.check_generate(request, MODEL)
    assert request.sampling_params == {name: None for name in fields if name != "n"}


def message(role: str, content="x", **fields) -> dict:
    return {"role": role, "content": content} | fields


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages must not be empty."),
        (["x"], 'messages[0] must be a JSON object, not "x".'),
        ([message("wizard")], "messages[0].role must be"),
        ([message("function")], "messages[0].role must be"),
        ([{"content": "x"}], "messages[0].role is missing."),
        ([message("user", None)], "messages[0].content is missing."),
        ([message("user", [])], "messages[0].content must not be empty."),
        ([message("user", 5)], "messages[0].content must be a string, not 5."),
        ([message("user", [{"type": "image_url"}])], 'messages[0].content[0].type must be "text"'),
        ([message("user", [{"type": "text"}])], "messages[0].content[0].text is missing."),
        ([message("user", "\ud83d")], "messages[0].content must be text"),
        ([message("developer", "")], "messages[0].content must not be empty."),
        ([message("assistant", None)], "messages[0].content is missing."),
        (
            [message("assistant", tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}])],
            "messages[0].tool_calls[0].function.arguments must be a JSON object, not [1].",
        ),
    ],
)
def test_messages_that_cannot_be_written(messages, named):
    assert sentence("openai_v1_chat_completions", {"messages": messages}).startswith(named)


@pytest.mark.parametrize(
    ("roles", "continues", "named"),
    [
        (["user"], False, None),
        (["system", "user"], False, None),
        (["user", "assistant", "tool"], False, None),
        (["developer"], False, None),
        (["user", "assistant"], False, None),
        (["user", "assistant"], True, None),
        (["system"], False, "messages[0].role"),
        (["user", "system"], False, "messages[1].role"),
        (["user", "latest_reminder"], False, "messages[1].role"),
        (["assistant"], True, "messages must hold more"),
        (["system", "assistant"], True, "messages[0].role"),
        (["user", "assistant", "assistant"], True, "messages[1].role"),
    ],
)
def test_the_assistant_speaks_next(roles, continues, named):
    fault = conversation.find_fault([message(role) for role in roles], continues)
    assert fault is None if named is None else fault.startswith(named)


@pytest.mark.parametrize("content", ["", " ", "\0", [{"type": "text", "text": ""}], "<｜User｜>"])
def test_messages_that_pass(content):
    silent = message("assistant", None, tool_calls=[CALL])
    messages = [message("user", content), silent, message("tool", None), message("user", content)]
    door.check_body("openai_v1_chat_completions", {"messages": messages}, MODEL)


def prompt_of(**fields):
    return SimpleNamespace(input_embeds=None, contains_mm_input=lambda: False, **fields)


@pytest.mark.parametrize("tokens", [[0], [511], [0, 7, 511]])
def test_tokens_of_the_vocabulary_pass(tokens):
    door.check_prompt(prompt_of(), tokens, MODEL)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([512], "Token id 512 is outside the vocabulary of 512"),
        ([3, -1], "Token id -1"),
        ([], "The prompt is empty"),
        (None, "The prompt is empty"),
    ],
)
def test_other_prompts_are_refused(tokens, said):
    with pytest.raises(Outside, match=said):
        door.check_prompt(prompt_of(), tokens, MODEL)


@pytest.mark.parametrize("text", ["", "x", "{}", '{"callable": "zz"}', '{"callable": "80"}'])
def test_a_processor_that_cannot_be_read(text):
    with pytest.raises(Outside, match="custom_logit_processor must be what"):
        door.check_processor(text)


def test_a_fault_of_pydantic_names_the_deepest_field():
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    body = chat(tools=[{"function": {"name": 5}}])
    try:
        ChatCompletionRequest.model_validate(body)
    except ValueError as error:
        errors = [fault | {"loc": ("body", *fault["loc"])} for fault in error.errors()]
    assert door.describe(errors, body) == (
        "tools[0].function.name: Input should be a valid string."
    )


@pytest.mark.parametrize("name", table.UNSERVED)
def test_nothing_is_looked_for_in_an_empty_list(name):
    """Failed before for some: the item of the first prompt was taken from the empty list."""
    request = GenerateReqInput(input_ids=[[5], [6]], sampling_params={"max_new_tokens": 1})
    setattr(request, name, [])
    door.check_generate(request, MODEL)
    request.normalize_batch_and_arguments()
    assert request[1].input_ids == [6]


@pytest.mark.parametrize("name", ["multi_item_delimiter_indices", "modalities"])
def test_lists_for_other_models_are_refused(name):
    request = GenerateReqInput(input_ids=[[5], [6]], sampling_params={"max_new_tokens": 1})
    setattr(request, name, [[1]])
    with pytest.raises(Outside, match=f"{name} is not served"):
        door.check_generate(request, MODEL)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_without_other_tokens_to_show(stream):
    """Failed before: status 500, or a stream that broke off."""
    body = {"prompt": [5], "echo": True, "logprobs": 0, "stream": stream}
    assert sentence("openai_v1_completions", body) == (
        "logprobs must be at least 1 where the prompt is echoed."
    )
    for fine in ({"echo": False}, {"logprobs": 1}, {"logprobs": None}):
        door.check_body("openai_v1_completions", body | fine, MODEL)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("endpoint", table.ENDPOINTS)
@given(data=st.data())
def test_any_json_is_taken_or_refused_in_one_sentence(endpoint, data):
    names = st.sampled_from(sorted(table.GENERATE | table.CHAT | table.ANTHROPIC | table.OLLAMA))
    body = data.draw(json_values | st.dictionaries(names, json_values, max_size=5))
    said = find_fault(endpoint, body)
    if said is not None:
        assert said.endswith(".")
        assert len(said) < 500
        assert len(said.splitlines()) == 1


def find_fault(endpoint: str, body: object) -> str | None:
    try:
        door.check_body(endpoint, body, MODEL)
    except Outside as fault:
        return str(fault)
    return None


@given(st.lists(st.integers(-3, V + 3) | st.booleans() | st.just(1.0), min_size=1))
def test_a_list_of_tokens_is_read_as_one_by_one(value):
    ok = all(type(t) is int and 0 <= t < V for t in value)
    try:
        rules.tokens(value, "t", MODEL)
        assert ok
    except Outside:
        assert not ok
