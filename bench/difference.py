"""Where two outputs first differ."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

Outputs = Sequence[Sequence[int]]  # by prompt


class Difference(NamedTuple):
    """Token `position` of the output to prompt `prompt`; None = that output had ended."""

    prompt: int
    position: int
    reference: str  # names of the two runs
    other: str
    expected: int | None
    found: int | None

    def __str__(self) -> str:
        return (
            f"token {self.position} of prompt {self.prompt} is {self.expected} in {self.reference} "
            f"and {self.found} in {self.other}"
        )


def first_index(a: Sequence[int], b: Sequence[int]) -> int | None:
    """First place at which two sequences differ, their lengths included; None if equal."""
    pairs = enumerate(zip_longest(a, b))
    return next((index for index, (x, y) in pairs if x != y), None)


def first_differences(runs: Mapping[str, Outputs]) -> list[Difference]:
    """First difference of every run from the first one, prompt by prompt; empty if all agree."""
    (reference, expected), *others = runs.items()
    found = []
    for name, outputs in others:
        for prompt, (a, b) in enumerate(zip(expected, outputs, strict=True)):
            index = first_index(a, b)
            if index is not None:
                found.append(
                    Difference(prompt, index, reference, name, _at(a, index), _at(b, index))
                )
    return found


def _at(ids: Sequence[int], index: int) -> int | None:
    return ids[index] if index < len(ids) else None
