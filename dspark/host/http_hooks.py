"""Hooks of the HTTP process: what is wrong with a request is said in one sentence, status 4xx."""

from collections.abc import AsyncIterable, AsyncIterator
from types import SimpleNamespace
from typing import Any

from dspark.host.ours import served_model


def serves_ours() -> bool:
    """Whether the HTTP server of this process has loaded DeepSeek-V4."""
    from sglang.srt.entrypoints.http_server import get_global_state

    state = get_global_state()
    return state is not None and served_model(state.tokenizer_manager) is not None


async def check_body(original, request):
    """ORJSONRequest.json reads the body of every endpoint, before anything is made of it."""
    body = await original(request)
    if serves_ours():
        from fastapi import HTTPException
        from sglang.srt.entrypoints.http_server import get_global_state

        from dspark.host.requests import door
        from dspark.host.requests.rules import Outside

        model = served_model(get_global_state().tokenizer_manager)
        endpoint = request.scope["endpoint"].__name__
        # SGLang leaves it out at start if it cannot be imported, and then ends in an error.
        if endpoint == "v1_responses_request" and not hasattr(
            request.app.state, "openai_serving_responses"
        ):
            raise HTTPException(
                status_code=400,
                detail="/v1/responses is not served: the package openai-harmony is missing.",
            )
        try:
            door.check_body(endpoint, body, model)
        except Outside as fault:
            raise HTTPException(status_code=400, detail=str(fault)) from None
    return body


async def describe_invalid(original, request, error):
    """Handler of what pydantic refuses: one sentence instead of all types that it tried."""
    if not serves_ours():
        return await original(request, error)
    from fastapi import HTTPException

    from dspark.host.requests import door

    answer = request.app.exception_handlers[HTTPException]
    sentence = door.describe(error.errors(), error.body)
    return await answer(request, HTTPException(status_code=400, detail=sentence))


def check_conversation(original, serving, request):
    """OpenAIServingChat._validate_request, which other APIs' conversations pass as well."""
    if served_model(serving.tokenizer_manager) is not None:
        from dspark.host.requests import door

        if fault := door.find_conversation_fault(request):
            return fault
    return original(serving, request)


def name_ollama_seed(original, serving, options=None):
    """OllamaServing hands on `seed`, which no sampling parameter is called."""
    parameters = original(serving, options)
    if served_model(serving.tokenizer_manager) is not None and "seed" in parameters:
        parameters["sampling_seed"] = parameters.pop("seed")
    return parameters


async def refuse_ollama(original, serving, request, raw_request):
    """OllamaServing.handle_chat and handle_generate let a refusal become status 500."""
    if served_model(serving.tokenizer_manager) is None:
        return await original(serving, request, raw_request)
    from fastapi import HTTPException
    from fastapi.responses import StreamingResponse

    tokenizer = serving.tokenizer_manager.tokenizer
    if hasattr(request, "messages") and getattr(tokenizer, "chat_template", None) is None:
        raise HTTPException(
            status_code=400,
            detail="This checkpoint has no chat template, which this endpoint needs; "
            "send the messages to /v1/chat/completions.",
        )
    try:
        response = await original(serving, request, raw_request)
        if isinstance(response, StreamingResponse):
            # A stream is refused when it is first asked for an event, before the status is sent.
            response.body_iterator = await started(response.body_iterator)
        return response
    except ValueError as fault:
        raise HTTPException(status_code=400, detail=str(fault)) from None


async def stream_ollama(original, serving, gen_request, raw_request, model_name):
    """OllamaServing's streams say nothing in their last event, whose text would be lost."""
    manager = serving.tokenizer_manager
    if served_model(manager) is None:
        return await original(serving, gen_request, raw_request, model_name)

    def generate_request(*args):
        return with_a_last_event_of_its_own(manager.generate_request(*args))

    same = SimpleNamespace(
        tokenizer_manager=SimpleNamespace(generate_request=generate_request),
        _get_timestamp=serving._get_timestamp,
    )
    return await original(same, gen_request, raw_request, model_name)


async def with_a_last_event_of_its_own(
    answers: AsyncIterable[dict[str, Any]],
) -> AsyncIterator[dict[str, Any]]:
    """The same answers; one that ends the request comes once before as if it did not."""
    async for answer in answers:
        if answer["meta_info"].get("finish_reason") is not None:
            yield answer | {"meta_info": answer["meta_info"] | {"finish_reason": None}}
        yield answer


async def started(events: AsyncIterable) -> AsyncIterator:
    """The same events; the first has been waited for."""
    remaining = aiter(events)
    first = await anext(remaining)

    async def rest():
        yield first
        async for event in remaining:
            yield event

    return rest()
