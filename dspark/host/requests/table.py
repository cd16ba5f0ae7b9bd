"""The fields of every request: their types and ranges.

One name means one thing wherever it stands; an endpoint lists which names it knows. Fields that an
endpoint does not list are nobody's business there, as in SGLang, but for sampling parameters:
SGLang knows no others and says so in a traceback.
"""

import functools
from typing import Any

from dspark.host.arguments import REASONING_PARSER, TOOL_CALL_PARSER
from dspark.host.requests.conversation import CONVERSATION, MESSAGES
from dspark.host.requests.grammars import grammar
from dspark.host.requests.rules import (
    INT32,
    INT64,
    Model,
    Outside,
    Rule,
    anything,
    choice,
    either,
    flag,
    integer,
    many,
    number,
    one_or_many,
    pattern,
    record,
    refuse,
    scalar,
    show,
    single_or_list,
    some_text,
    text,
    token,
    tokens,
    unserved,
)

MOST_CHOICES = 128  # `n`, as at OpenAI
MOST_LOGPROBS = 1024  # top log probabilities of a position
# Added to a logit and divided by the least temperature, this is still far from infinity.
MOST_BIAS = 1e30
MOST_TEMPERATURE = 1e6
LEAST_REPETITION = 0.01
TOP_K_ALL = 1 << 30  # SGLang's word for "the whole vocabulary"
HEALTH_CHECK = "HEALTH_CHECK"  # beginning of the ids of SGLang's own requests, which it may drop


def top_k(value: Any, name: str, model: Model) -> None:
    if type(value) is not int or not (value == -1 or 1 <= value <= TOP_K_ALL):
        integer(1, TOP_K_ALL)(value, f"{name}, unless it is -1,", model)


def top_p(value: Any, name: str, model: Model) -> None:
    number(0, 1)(value, name, model)
    if not value:
        raise Outside(f"{name} must be above 0.")


def top_logprobs(model: Model) -> int:
    return min(MOST_LOGPROBS, model.vocab_size)


def logit_bias(value: Any, name: str, model: Model) -> None:
    """Token ids, written as strings, and what is added to their logits."""
    record({})(value, name, model)
    for key, bias in value.items():
        written = isinstance(key, str) and key.isascii() and key.isdigit() and str(int(key)) == key
        token(int(key) if written else key, f"The key of {name}", model)
        bias_range(bias, f"{name}.{key}", model)


bias_range = number(-MOST_BIAS, MOST_BIAS)


def custom_params(value: Any, name: str, model: Model) -> None:
    """What SGLang can send to a worker: two levels of scalars."""
    record({})(value, name, model)
    for key, item in value.items():
        text(key, f"The key of {name}", model)
        inner = f"{name}.{show(key)}"
        if isinstance(item, dict):
            for word, single in item.items():
                if single is not None:
                    scalar(single, f"{inner}.{show(word)}", model)
        elif item is not None:
            one_or_many(scalar)(item, inner, model)


def request_id(value: Any, name: str, model: Model) -> None:
    some_text(value, name, model)
    if str(value).startswith(HEALTH_CHECK):
        raise Outside(f"{name} must not begin with {HEALTH_CHECK}.")


SAMPLING: dict[str, Rule] = {
    "temperature": number(0, MOST_TEMPERATURE),
    "top_p": top_p,
    "top_k": top_k,
    "min_p": number(0, 1),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repetition_penalty": number(LEAST_REPETITION, 2),
    "logit_bias": logit_bias,
    "n": integer(1, MOST_CHOICES),
    "stop": one_or_many(some_text),
    "stop_token_ids": many(token),
    "stop_regex": one_or_many(pattern),
    "no_stop_trim": flag,
    "ignore_eos": flag,
    "skip_special_tokens": flag,
    "regex": grammar,
    "ebnf": grammar,
    "custom_params": custom_params,
}

SAMPLING_PARAMS = SAMPLING | {
    "max_new_tokens": integer(0, INT32),
    "min_new_tokens": integer(0, INT32),
    "sampling_seed": integer(-INT64 - 1, INT64),
    "json_schema": grammar,
    "structural_tag": grammar,
    "spaces_between_special_tokens": flag,
    "stream_interval": integer(1, INT32),
}
sampling_params = record(SAMPLING_PARAMS, closed=True)

# What SGLang offers for other models or other set-ups.
NO_MEDIA = unserved("the model reads text")
NO_LORA = unserved("there are no LoRA adapters")
NO_SPLIT = unserved("prompts and answers are computed by one server")
NO_EXPERTS = unserved("the choice of experts is not kept")
NO_VECTORS = unserved("a prompt is text or token ids")
NO_ITEMS = unserved("every item to score is a prompt of its own")
ONE_SERVER: dict[str, Rule] = {
    "routed_dp_rank": integer(0, 0),
    "disagg_prefill_dp_rank": integer(0, 0),
    "bootstrap_host": NO_SPLIT,
    "bootstrap_port": NO_SPLIT,
    "bootstrap_room": NO_SPLIT,
}
SHARED: dict[str, Rule] = ONE_SERVER | {
    "stream": flag,
    "lora_path": NO_LORA,
    "return_routed_experts": NO_EXPERTS,
    "routed_experts_start_len": integer(0, INT32),
    "session_id": text,
    "session_params": record(
        {
            "id": text,
            "rid": text,
            "offset": integer(-1, INT32),
            "replace": flag,
            "drop_previous_output": flag,
        },
        closed=True,
    ),
    "priority": integer(-INT64 - 1, INT64),
    "images_config": NO_MEDIA,
}
custom_labels = record({})

hidden_states = either(flag, choice("last"))


def prompts(value: Any, name: str, model: Model) -> None:
    """One prompt of token ids or a list of such prompts."""
    nested = type(value) is list and bool(value) and type(value[0]) is list
    (many(tokens) if nested else tokens)(value, name, model)


GENERATE = SHARED | {
    "text": single_or_list(text, many(text, least=1)),
    "input_ids": prompts,
    "sampling_params": one_or_many(sampling_params),
    "rid": one_or_many(request_id),
    "return_logprob": one_or_many(flag),
    "logprob_start_len": one_or_many(integer(-1, INT32)),
    "top_logprobs_num": one_or_many(integer(0, top_logprobs)),
    "token_ids_logprob": one_or_many(one_or_many(token)),
    "return_sampling_mask": one_or_many(unserved("what a token was drawn from is not kept")),
    "return_text_in_logprobs": flag,
    "return_flat_raw_top_logprobs": flag,
    "return_flat_raw_top_logprobs_b64": flag,
    "log_metrics": flag,
    "custom_labels": custom_labels,
    "return_hidden_states": one_or_many(hidden_states),
    "extra_key": one_or_many(text),
    "custom_logit_processor": one_or_many(text),
    "routing_key": text,
    "conversation_id": text,
    "background": flag,
    "require_reasoning": flag,
    "max_thinking_tokens": integer(0, INT32),
    "no_logs": flag,
    "return_bytes": flag,
    "return_entropy": flag,
    "return_prompt_token_ids": flag,
    "external_trace_header": record({}),
    "received_time": number(0, 1e18),
    "input_embeds": NO_VECTORS,
    "positional_embed_overrides": NO_VECTORS,
    "multi_item_delimiter_indices": NO_ITEMS,
    "lora_id": NO_LORA,
    "return_indexer_topk": NO_EXPERTS,
    "bootstrap_pair_key": NO_SPLIT,
    "decode_tp_size": NO_SPLIT,
    "need_wait_for_mm_inputs": NO_SPLIT,
    "num_items_assigned": NO_SPLIT,
    "mm_data_mooncake": NO_SPLIT,
    "encoder_urls": NO_SPLIT,
    "http_worker_ipc": anything,  # SGLang writes it
    "image_data": NO_MEDIA,
    "video_data": NO_MEDIA,
    "audio_data": NO_MEDIA,
    "mm_hashes": NO_MEDIA,
    "use_audio_in_video": NO_MEDIA,
    "modalities": NO_MEDIA,  # SGLang writes an empty list for chats
    "max_dynamic_patch": NO_MEDIA,
    "min_dynamic_patch": NO_MEDIA,
    "image_max_dynamic_patch": NO_MEDIA,
    "video_max_dynamic_patch": NO_MEDIA,
}

# SGLang looks for an item of each prompt also in a list that is empty.
UNSERVED = tuple(
    name
    for name, rule in GENERATE.items()
    if rule in (NO_MEDIA, NO_LORA, NO_SPLIT, NO_EXPERTS, NO_VECTORS, NO_ITEMS)
)


def texts_or_tokens(value: Any, name: str, model: Model) -> None:
    texts = type(value) is list and bool(value) and type(value[0]) is str
    (many(text) if texts else prompts)(value, name, model)


# One value, or one for each prompt of a list.
PER_PROMPT = (
    "sampling_params",
    "rid",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_sampling_mask",
    "return_hidden_states",
    "extra_key",
    "custom_logit_processor",
)

RESPONSE_FORMAT = record(
    {
        "type": choice("text", "json_object", "json_schema", "structural_tag"),
        "json_schema": record(
            {"name": text, "description": text, "schema": record({}), "strict": flag}
        ),
        "schema": record({}),
    },
    need=("type",),
)
OPENAI = (
    SHARED
    | SAMPLING
    | {
        "model": text,
        "min_tokens": integer(0, INT32),
        "seed": SAMPLING_PARAMS["sampling_seed"],
        "stream_options": record({"include_usage": flag, "continuous_usage_stats": flag}),
        "user": text,
        "return_hidden_states": hidden_states,
        "return_cached_tokens_details": flag,
        "return_token_ids": flag,
        "response_format": RESPONSE_FORMAT,
        "custom_logit_processor": text,
        "data_parallel_rank": integer(0, 0),
        "rid": request_id,
        "extra_key": text,
        "cache_salt": text,
    }
)
COMPLETION = OPENAI | {
    "prompt": single_or_list(text, texts_or_tokens),
    "custom_labels": custom_labels,
    "best_of": integer(1, MOST_CHOICES),
    "echo": flag,
    "logprobs": integer(0, top_logprobs),
    "max_tokens": integer(1, INT32),
    "suffix": text,
    "json_schema": grammar,
    "rid": one_or_many(request_id),
}
completion_fields = record(COMPLETION, need=("prompt",))


def completion(value: Any, name: str, model: Model) -> None:
    completion_fields(value, name, model)
    if value.get("echo") and value.get("logprobs") == 0:  # SGLang looks for the others all the same
        raise Outside("logprobs must be at least 1 where the prompt is echoed.")


TOOLS = many(
    record(
        {
            "type": text,
            "function": record(
                {
                    "name": some_text,
                    "description": text,
                    "parameters": record({}),
                    "strict": flag,
                },
                need=("name",),
            ),
            "defer_loading": flag,
        },
        need=("function",),
    )
)
CHAT = (
    OPENAI
    | CONVERSATION
    | {
        "logprobs": flag,
        "top_logprobs": integer(0, top_logprobs),
        "max_tokens": integer(1, INT32),
        "max_completion_tokens": integer(1, INT32),
        "tools": TOOLS,
        "parallel_tool_calls": flag,
        "return_prompt_token_ids": flag,
        "return_meta_info": flag,
        "separate_reasoning": flag,
        "stream_reasoning": flag,
        "task": choice("action", "query", "authority", "domain", "title", "read_url"),
        "max_dynamic_patch": NO_MEDIA,
        "min_dynamic_patch": NO_MEDIA,
        "use_audio_in_video": NO_MEDIA,
        "input_ids": tokens,
    }
)
RESPONSES = {
    name: OPENAI[name]
    for name in (
        "model",
        "stream",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "stop",
        "user",
        "session_id",
        "priority",
        "extra_key",
        "cache_salt",
    )
} | {
    "input": single_or_list(text, many(record({}), least=1)),
    "instructions": text,
    "background": flag,
    "include": many(text),
    "max_output_tokens": integer(1, INT32),
    "max_tool_calls": integer(1, INT32),
    "metadata": record({}),
    "parallel_tool_calls": flag,
    "previous_response_id": some_text,
    "reasoning": record({"effort": text, "summary": text}),
    "request_id": some_text,
    "service_tier": text,
    "store": flag,
    "tool_choice": choice("auto", "required", "none"),
    "tools": many(record({"type": text}, need=("type",))),
    "top_logprobs": integer(0, top_logprobs),
    "truncation": choice("auto", "disabled"),
}
TOKENIZE = CONVERSATION | {
    "model": text,
    "prompt": one_or_many(text),
    "tools": TOOLS,
    "add_special_tokens": flag,
}
DETOKENIZE: dict[str, Rule] = {
    "model": text,
    "tokens": prompts,
    "skip_special_tokens": flag,
}
SCORE: dict[str, Rule] = {
    "model": text,
    "query": single_or_list(text, tokens),
    "items": single_or_list(text, texts_or_tokens),
    "label_token_ids": tokens,
    "apply_softmax": flag,
    "item_first": flag,
    "return_pooled_hidden_states": unserved("the model generates text"),
    "embed_override_token_id": NO_VECTORS,
    "query_embed_overrides": NO_VECTORS,
    "item_embed_overrides": NO_VECTORS,
}

ANTHROPIC_MESSAGES = many(
    record(
        {
            "role": choice("user", "assistant", "system"),
            "content": single_or_list(text, many(record({}))),
        },
        need=("role", "content"),
    ),
    least=1,
)
COUNT_TOKENS: dict[str, Rule] = {
    "model": some_text,
    "messages": ANTHROPIC_MESSAGES,
    "system": single_or_list(text, many(record({}))),
    "thinking": record({"type": text, "budget_tokens": integer(1024, INT32), "display": text}),
    "tool_choice": record({"type": text, "name": text}),
    "tools": many(record({"name": some_text, "description": text, "input_schema": record({})})),
    "output_config": record(
        {
            "effort": text,
            "task_budget": record(
                {
                    "type": text,
                    "total": integer(1, INT32),
                    "remaining": integer(0, INT32),
                }
            ),
        }
    ),
    "betas": many(text),
}
ANTHROPIC = COUNT_TOKENS | {
    "max_tokens": integer(1, INT32),
    "metadata": record({}),
    "stop_sequences": many(some_text),
    "stream": flag,
    "temperature": SAMPLING["temperature"],
    "top_k": top_k,
    "top_p": top_p,
}

OLLAMA_OPTIONS = {
    name: SAMPLING[name]
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "presence_penalty",
        "frequency_penalty",
    )
} | {"num_predict": integer(1, INT32), "seed": SAMPLING_PARAMS["sampling_seed"]}
OLLAMA: dict[str, Rule] = {
    "model": text,
    "stream": flag,
    "format": either(choice("json"), record({})),
    "options": record(OLLAMA_OPTIONS),
    "keep_alive": either(number(-1e18, 1e18), text),
}
OLLAMA_CHAT = OLLAMA | {
    "messages": MESSAGES,
    "think": either(flag, choice("low", "medium", "high")),
}
OLLAMA_GENERATE = OLLAMA | {
    "prompt": text,
    "suffix": text,
    "system": text,
    "template": text,
    "context": many(token),
    "raw": flag,
    "images": NO_MEDIA,
    "think": flag,
}
PROMPT_FIELDS = ("text", "input_ids", "input_embeds", "image_data")
VERTEX: dict[str, Rule] = {
    "instances": many(record({name: GENERATE[name] for name in PROMPT_FIELDS})),
    "parameters": record(
        {name: rule for name, rule in GENERATE.items() if name not in PROMPT_FIELDS}, closed=True
    ),
}


def reasoning_parser(value: Any, name: str, model: Model) -> None:
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    some_text(value, name, model)
    if value.lower() not in ReasoningParser.DetectorMap:
        refuse(name, f'the name of a parser, as "{REASONING_PARSER}"', value)


def tool_call_parser(value: Any, name: str, model: Model) -> None:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    some_text(value, name, model)
    if value not in FunctionCallParser.ToolCallParserEnum:
        refuse(name, f'the name of a parser, as "{TOOL_CALL_PARSER}"', value)


PARSE_CALLS = {"text": text, "tools": TOOLS, "tool_call_parser": tool_call_parser}
SEPARATE = {"text": text, "reasoning_parser": reasoning_parser, "return_blocks": flag}

# By the name of the function that SGLang answers the endpoint with; its path can be configured.
ENDPOINTS: dict[str, Rule] = {
    "generate_request": record(GENERATE),
    "vertex_generate": record(VERTEX),
    "openai_v1_completions": completion,
    "openai_v1_chat_completions": record(CHAT, need=("messages",)),
    "sagemaker_chat_completions": record(CHAT, need=("messages",)),
    "v1_responses_request": record(RESPONSES, need=("input", "model")),
    "openai_v1_tokenize": record(TOKENIZE),
    "openai_v1_detokenize": record(DETOKENIZE, need=("tokens",)),
    "v1_score_request": record(SCORE, need=("query", "items", "label_token_ids")),
    "anthropic_v1_messages": record(ANTHROPIC, need=("messages", "max_tokens")),
    "anthropic_v1_count_tokens": record(COUNT_TOKENS, need=("messages",)),
    "parse_function_call_request": record(PARSE_CALLS, need=("text", "tool_call_parser")),
    "separate_reasoning_request": record(SEPARATE, need=("text", "reasoning_parser")),
    "ollama_chat": record(OLLAMA_CHAT, need=("messages",)),
    "ollama_generate": record(OLLAMA_GENERATE),
}


def refuse_endpoint(what: str, value: object, name: str, model: Model) -> None:
    raise Outside(f"This server generates text; it computes no {what}.")


ENDPOINTS |= {
    endpoint: functools.partial(refuse_endpoint, what)
    for endpoint, what in {
        "encode_request": "embeddings",
        "openai_v1_embeddings": "embeddings",
        "classify_request": "classes",
        "openai_v1_classify": "classes",
        "v1_rerank_request": "rankings",
    }.items()
}
