"""Where requests come in: JSON bodies, SGLang's own request objects, conversations."""

from collections.abc import Sequence
from typing import Any

from dspark.host.requests import conversation
from dspark.host.requests.rules import Model, Outside, one_or_many, record, some_text
from dspark.host.requests.table import ENDPOINTS, GENERATE, PER_PROMPT, UNSERVED

# SGLang's own health checks come this way; nobody else may use their ids.
check_fields = record(GENERATE | {"rid": one_or_many(some_text)})


def check_body(endpoint: str, body: object, model: Model) -> None:
    """Check the JSON body of one HTTP request.

    Args:
        endpoint: name of SGLang's function that answers it.
        body: as parsed.
        model: what is served.

    Raises:
        Outside: the first field that is outside the table.
    """
    if rule := ENDPOINTS.get(endpoint):
        rule(body, "", model)


def check_generate(request, model: Model) -> None:
    """Check a request before SGLang spreads it over its prompts.

    Raises:
        Outside: no GenerateReqInput, a field outside the table, or lists that do not fit each
            other.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    if not isinstance(request, GenerateReqInput):
        raise Outside("This server generates text; it computes no embeddings, classes or scores.")
    fields = {name: getattr(request, name) for name in GENERATE}
    check_fields(fields, "", model)
    if fields["text"] is not None and fields["input_ids"] is not None:
        raise Outside("text and input_ids must not both be given.")
    prompts = count_prompts(fields)
    for name in PER_PROMPT:
        check_length(name, fields[name], prompts)
    chosen = fields["token_ids_logprob"]
    if chosen and isinstance(chosen[0], list):
        check_length("token_ids_logprob", chosen, prompts)
    request.sampling_params = without_null_n(request.sampling_params)
    for name in UNSERVED:
        if fields[name] in ([], {}):
            setattr(request, name, None)


def count_prompts(fields: dict[str, Any]) -> int | None:
    """Length of a list of prompts; None for a single prompt.

    Raises:
        Outside: there is no prompt.
    """
    text, input_ids = fields["text"], fields["input_ids"]
    if text is None and input_ids is None:
        raise Outside("text or input_ids is missing.")
    if isinstance(text, list):
        return len(text)
    return len(input_ids) if input_ids and isinstance(input_ids[0], list) else None


def check_length(name: str, value: object, prompts: int | None) -> None:
    if not isinstance(value, list):
        return
    if prompts is None:
        raise Outside(f"{name} must not be a list where there is a single prompt.")
    if len(value) != prompts:
        raise Outside(f"{name} must have one item for each of the {prompts} prompts.")


def without_null_n(parameters):
    """The same sampling parameters; SGLang takes every null for its default but that of `n`."""
    if isinstance(parameters, list):
        return [without_null_n(each) for each in parameters]
    if parameters and "n" in parameters and parameters["n"] is None:
        return {name: value for name, value in parameters.items() if name != "n"}
    return parameters


def find_conversation_fault(request) -> str | None:
    """One sentence about the messages of a ChatCompletionRequest; None if they can be answered."""
    if not request.messages or request.input_ids is not None:
        return None  # SGLang refuses the one; the messages of the other are not read
    messages = [message.model_dump() for message in request.messages]
    try:
        conversation.MESSAGES(messages, "messages", Model(vocab_size=0))
    except Outside as fault:
        return str(fault)
    return conversation.find_fault(messages, request.continue_final_message)


def check_prompt(request, input_ids: Sequence[int] | None, model: Model) -> None:
    """Check the tokens of one prompt, whoever made them.

    Args:
        request: SGLang's GenerateReqInput or EmbeddingReqInput.
        input_ids: its prompt, None when it brings embeddings instead.

    Raises:
        Outside: no tokens, or tokens outside the vocabulary.
    """
    if getattr(request, "input_embeds", None) is not None:
        raise Outside("input_embeds is not served: a prompt is text or token ids.")
    if request.contains_mm_input():
        raise Outside("image_data, video_data and audio_data are not served: a prompt is text.")
    if not input_ids:
        raise Outside("The prompt is empty: it must have at least one token.")
    for token in input_ids:
        if not 0 <= token < model.vocab_size:
            raise Outside(
                f"Token id {token} is outside the vocabulary of {model.vocab_size} tokens."
            )


def check_processor(text: str) -> None:
    """Read a custom logit processor as the worker will; there, a fault would end the server.

    Call it only where the operator allows such processors: they are code.

    Raises:
        Outside: it cannot be read.
    """
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    try:
        CustomLogitProcessor.from_str(text)
    except Exception as error:  # it runs what the client wrote
        raise Outside(
            "custom_logit_processor must be what CustomLogitProcessor.to_str() writes; reading it "
            f"fails with {type(error).__name__}."
        ) from None


def describe(errors: Sequence[dict[str, Any]], body: object) -> str:
    """One sentence for what pydantic found, naming the field deepest inside the body.

    Args:
        errors: of a RequestValidationError; `loc` starts with "body" and also names the types
            that were tried.
        body: what was checked.
    """

    def path(error: dict[str, Any]) -> list:
        found, inside = [], body
        for step in error.get("loc", ())[1:]:
            if (isinstance(inside, dict) and step in inside) or (
                isinstance(inside, list) and isinstance(step, int) and step < len(inside)
            ):
                inside = inside[step]
            else:
                continue
            found.append(step)
        return found

    error = max(errors, key=lambda each: len(path(each)))
    steps = path(error) or [step for step in error.get("loc", ()) if step != "body"][-1:]
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    if error.get("type") == "json_invalid":
        return f"The body is not JSON: {error.get('ctx', {}).get('error', 'it cannot be read')}."
    said = str(error.get("msg", "is not as expected")).removeprefix("Value error, ").rstrip(".")
    return f"{name.removeprefix('.') or 'The request'}: {said}."
