"""Conversations: each can be written as a prompt that ends where the assistant is to speak."""

import json
from typing import Any

from dspark.host.requests.rules import (
    Model,
    Outside,
    Rule,
    choice,
    either,
    flag,
    integer,
    many,
    number,
    record,
    show,
    single_or_list,
    some_text,
    text,
)

ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
ANSWERED = ("user", "developer", "tool")  # roles after which the assistant speaks


def text_part(value: Any, name: str, model: Model) -> None:
    record({}, need=("type",))(value, name, model)
    part: dict[str, Any] = value
    if part["type"] != "text":
        raise Outside(f'{name}.type must be "text", not {show(part["type"])}.')
    record({"text": text}, need=("text",))(value, name, model)


def thought_part(value: Any, name: str, model: Model) -> None:
    kinds = record({"type": choice("thinking", "reasoning"), "thinking": text, "text": text})
    kinds(value, name, model)


content = single_or_list(text, many(text_part, least=1))
assistant_content = single_or_list(text, many(either(thought_part, text_part), least=1))


def arguments(value: Any, name: str, model: Model) -> None:
    """Arguments of a call: an object, or one written as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Outside(f"{name} must be valid JSON, not {show(value)}.") from None
    record({})(value, name, model)


tool_calls = many(
    record(
        {
            "id": text,
            "index": integer(0, 2**31 - 1),
            "type": choice("function"),
            "function": record({"name": some_text, "arguments": arguments}, need=("name",)),
        },
        need=("function",),
    )
)
named = record({"role": choice(*ROLES)}, need=("role",))


def message(value: Any, name: str, model: Model) -> None:
    named(value, name, model)
    spoken = value["role"] == "assistant"
    fields = {
        "content": assistant_content if spoken else content,
        "tool_call_id": text,
        "name": text,
        "reasoning_content": text,
        "tool_calls": tool_calls,
        "tools": many(record({})),
    }
    record(fields)(value, name, model)
    # A tool may return nothing, and an assistant may only call tools or think.
    silent = value["role"] == "tool" or (
        spoken and (value.get("tool_calls") or value.get("reasoning_content"))
    )
    if value.get("content") is None and not silent:
        raise Outside(f"{name}.content is missing.")
    if value["role"] == "developer" and not value["content"]:
        raise Outside(f"{name}.content must not be empty.")


MESSAGES = many(message, least=1)
TEMPLATE = record(
    {
        "thinking": flag,
        "enable_thinking": flag,
        "reasoning_effort": either(number(0, 0.99), text),
        "spaces_between_special_tokens": flag,
    }
)
CONVERSATION: dict[str, Rule] = {
    "messages": MESSAGES,
    "tool_choice": either(
        choice("auto", "required", "none"),
        record(
            {"type": choice("function"), "function": record({"name": text}, need=("name",))},
            need=("function",),
        ),
    ),
    "reasoning_effort": either(number(0, 0.99), text),
    "continue_final_message": flag,
    "chat_template_kwargs": TEMPLATE,
}


def find_fault(messages: list[dict[str, Any]], continues: bool) -> str | None:
    """One sentence if the prompt of these messages would not end with the assistant's turn.

    Args:
        messages: at least one, each with a role.
        continues: the last message is the beginning of the answer.
    """
    last = messages[-1]["role"]
    if last == "assistant" and not continues:
        return None  # SGLang takes it for the user's
    if last == "assistant" and len(messages) == 1:
        return "messages must hold more than the message that continue_final_message continues."
    index = len(messages) - (2 if last == "assistant" else 1)
    role = messages[index]["role"]
    if role not in ANSWERED:
        return (
            f"messages[{index}].role must not be {show(role)} where the assistant is to answer "
            "next; end with a message of role user, developer or tool."
        )
    return None
