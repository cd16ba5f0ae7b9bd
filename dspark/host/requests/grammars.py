"""Grammars: text that a compiler of the worker has to read."""

from typing import Any

from dspark.host.requests.rules import Model, Outside, text

MOST_CHARACTERS = 1 << 18
DEEPEST = 128  # brackets open at once; the compiler descends into each and has only one stack


def depth(grammar: str) -> int:
    """Most brackets of any kind that are open at once, those in strings included."""
    deepest = opened = 0
    for character in grammar:
        if character in "([{":
            opened += 1
            deepest = max(deepest, opened)
        elif character in ")]}":
            opened -= 1
    return deepest


def grammar(value: Any, name: str, model: Model) -> None:
    """A JSON schema, a regular expression, a grammar or a structural tag, each as text."""
    text(value, name, model)
    length = len(str(value))
    if length > MOST_CHARACTERS:
        raise Outside(f"{name} must have at most {MOST_CHARACTERS} characters, not {length}.")
    if depth(str(value)) > DEEPEST:
        raise Outside(f"{name} must not nest more than {DEEPEST} brackets.")
