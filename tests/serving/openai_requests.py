"""Requests through the openai client, and what a user makes of their answers."""

from typing import Any, NamedTuple

import openai


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


def literally(text: str) -> dict[str, Any]:
    """A grammar that admits this text only."""
    special = "\\.^$*+?{}[]()|/\"'"
    escaped = "".join(f"\\{c}" if c in special else c for c in text)
    return {"regex": escaped.replace("\n", "\\n")}


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
