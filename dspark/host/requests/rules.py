"""Kinds of values a field may hold. A rule says nothing about a value, or raises one sentence.

Types are taken as they are written: `true` and `1.0` are no integers, `"1"` is no number. A
number may be written as an integer.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Model(NamedTuple):
    """What of the served model bounds a request."""

    vocab_size: int


class Outside(ValueError):
    """A field that is outside the table; the message is one sentence that names it."""


Rule = Callable[[Any, str, Model], None]  # (value, name of the field, model)
Bound = int | Callable[[Model], int]

SHOWN = 60  # characters of a value that a sentence repeats
INT32, INT64 = 2**31 - 1, 2**63 - 1


def show(value: object) -> str:
    """The value as JSON, shortened."""
    text = "null" if value is None else json.dumps(value, default=repr)[: SHOWN + 1]
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def refuse(name: str, wanted: str, value: object) -> None:
    raise Outside(f"{name} must be {wanted}, not {show(value)}.")


def anything(value: Any, name: str, model: Model) -> None:
    """A field that is read by nobody, or checked by whoever reads it."""


def flag(value: Any, name: str, model: Model) -> None:
    if type(value) is not bool:
        refuse(name, "true or false", value)


def text(value: Any, name: str, model: Model) -> None:
    if type(value) is not str:
        refuse(name, "a string", value)
    try:
        str(value).encode()
    except UnicodeEncodeError:  # half of a surrogate pair; JSON itself can write one
        raise Outside(f"{name} must be text that can be written as UTF-8.") from None


def some_text(value: Any, name: str, model: Model) -> None:
    text(value, name, model)
    if not value:
        refuse(name, "a string of at least one character", value)


def scalar(value: Any, name: str, model: Model) -> None:
    """What SGLang can send to a worker as it is."""
    if type(value) is str:
        text(value, name, model)
    elif type(value) not in (bool, int, float) or not -INT64 <= value <= INT64:
        refuse(name, "a string, a number of at most 64 bits, true or false", value)


def integer(low: int, high: Bound) -> Rule:
    """An integer from `low` to `high`, both included."""

    def check(value: Any, name: str, model: Model) -> None:
        top = high(model) if callable(high) else high
        if type(value) is not int or not low <= value <= top:
            refuse(name, f"an integer from {low} to {top}", value)

    return check


def number(low: float, high: float) -> Rule:
    """A finite number from `low` to `high`, both included."""

    def check(value: Any, name: str, model: Model) -> None:
        # NaN is not between any two numbers.
        if type(value) not in (int, float) or not low <= value <= high:
            refuse(name, f"a number from {low:g} to {high:g}", value)

    return check


def choice(*words: str) -> Rule:
    def check(value: Any, name: str, model: Model) -> None:
        if type(value) is not str or value not in words:
            refuse(name, " or ".join(f'"{word}"' for word in words), value)

    return check


def unserved(why: str) -> Rule:
    """A field of SGLang that this server has no use for, unless it says "no" itself."""

    def check(value: Any, name: str, model: Model) -> None:
        if value not in (None, False, [], {}) or type(value) in (int, float):
            raise Outside(f"{name} is not served: {why}.")

    return check


def either(*rules: Rule) -> Rule:
    """The last rule's sentence is told where none holds."""

    def check(value: Any, name: str, model: Model) -> None:
        for rule in rules[:-1]:
            try:
                return rule(value, name, model)
            except Outside:
                continue
        return rules[-1](value, name, model)

    return check


def many(rule: Rule, least: int = 0) -> Rule:
    """A list of what `rule` allows."""

    def check(value: Any, name: str, model: Model) -> None:
        if type(value) is not list:
            refuse(name, "a list", value)
        if len(value) < least:
            raise Outside(f"{name} must not be empty.")
        for index, item in enumerate(value):
            rule(item, f"{name}[{index}]", model)

    return check


def single_or_list(single: Rule, listed: Rule) -> Rule:
    """What `listed` allows of lists, and `single` of everything else."""

    def check(value: Any, name: str, model: Model) -> None:
        (listed if type(value) is list else single)(value, name, model)

    return check


def one_or_many(rule: Rule) -> Rule:
    """What `rule` allows, or a list of it."""
    return single_or_list(rule, many(rule))


def tokens(value: Any, name: str, model: Model) -> None:
    """A list of at least one token of the vocabulary."""
    if type(value) is not list:
        refuse(name, "a list of token ids", value)
    if not value:
        raise Outside(f"{name} must not be empty.")
    # Prompts are long: look at single tokens only where something is wrong.
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) >= model.vocab_size:
        for index, item in enumerate(value):
            token(item, f"{name}[{index}]", model)


def token(value: Any, name: str, model: Model) -> None:
    if type(value) is not int or not 0 <= value < model.vocab_size:
        raise Outside(
            f"{name} must be a token id of the vocabulary, from 0 to {model.vocab_size - 1}, "
            f"not {show(value)}."
        )


def pattern(value: Any, name: str, model: Model) -> None:
    """A regular expression as Python reads it."""
    some_text(value, name, model)
    try:
        re.compile(str(value))
    except (re.error, OverflowError, RecursionError) as error:
        raise Outside(f"{name} must be a regular expression: {error}.") from None


def record(fields: Mapping[str, Rule], closed: bool = False, need: tuple[str, ...] = ()) -> Rule:
    """A JSON object whose fields are as told; null is as good as absent.

    Args:
        fields: rule of each field.
        closed: refuse fields that are not named; otherwise they are nobody's business.
        need: fields that must be there.
    """

    def check(value: Any, name: str, model: Model) -> None:
        if not isinstance(value, dict):
            raise Outside(f"{name or 'The request'} must be a JSON object, not {show(value)}.")
        start = f"{name}." if name else ""
        for key in need:
            if value.get(key) is None:
                raise Outside(f"{start}{key} is missing.")
        for key, item in value.items():
            rule = fields.get(key) if isinstance(key, str) else None
            if rule is None and closed:
                word = key if isinstance(key, str) and key.isidentifier() else show(key)
                raise Outside(f"{start}{word[:SHOWN]} is not a field that this server knows.")
            if rule is not None and item is not None:
                rule(item, f"{start}{key}", model)

    return check
