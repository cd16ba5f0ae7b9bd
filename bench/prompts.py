"""Prompts that everybody measures with: two frozen texts and random ids, cut to one length.

`code` is a snapshot of this project's source, `prose` of its documentation (both Apache-2.0).
`synthetic` is random token ids: no text, so acceptance measured on it says nothing about text.
"""

import hashlib
import json
import random
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, Protocol

SETS = ("code", "prose", "synthetic")


class PromptError(ValueError):
    """The prompts that were asked for cannot be made; one sentence."""


class PromptSet(NamedTuple):
    name: str
    ids: list[list[int]]
    sha256: str  # of the id lists: equal hashes mean equal input
    tokenizer: str  # "model", "bytes" or "none"

    def describe(self) -> dict[str, object]:
        """What a result file records."""
        return {
            "set": self.name,
            "synthetic": self.name == "synthetic",
            "prompts": len(self.ids),
            "input_tokens": len(self.ids[0]),
            "sha256": self.sha256,
            "tokenizer": self.tokenizer,
        }


class Tokenizer(Protocol):
    def __len__(self) -> int: ...

    def encode(self, text: str, **options: bool) -> list[int]: ...


class Bytes:
    """One id per byte: 0..255. For a server whose tokenizer is not at hand."""

    def __len__(self) -> int:
        return 256

    def encode(self, text: str, **options: bool) -> list[int]:
        return list(text.encode())


def load_tokenizer(model_path: str | Path | None) -> Tokenizer:
    """The checkpoint's tokenizer, or bytes when there is no checkpoint or no tokenizer in it."""
    if model_path is None:
        return Bytes()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model_path))
    except (OSError, ValueError):
        return Bytes()


def make_prompts(
    name: str, count: int, length: int, tokenizer: Tokenizer, seed: int = 0
) -> PromptSet:
    """`count` different prompts of exactly `length` tokens.

    A text is tokenised once and cut into consecutive pieces, so prompt i is the same however many
    are asked for.

    Raises:
        PromptError: unknown set, no tokens asked for, or a text too short for so many prompts.
    """
    if name not in SETS:
        raise PromptError(f"There is no prompt set {name!r}; choose from {', '.join(SETS)}.")
    if count < 1 or length < 1:
        raise PromptError(f"Cannot make {count} prompts of {length} tokens.")
    if name == "synthetic":
        ids = _random_ids(count, length, len(tokenizer), seed)
    else:
        ids = _pieces(name, count, length, tokenizer)
    kind = {"synthetic": "none"}.get(name, "bytes" if isinstance(tokenizer, Bytes) else "model")
    return PromptSet(name, ids, ids_sha256(ids), kind)


def ids_sha256(ids: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest()


def _random_ids(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    # Ids 0 and 1 begin and end a text in the checkpoints of this project.
    return [[rng.randrange(2, vocabulary) for _ in range(length)] for _ in range(count)]


def _pieces(name: str, count: int, length: int, tokenizer: Tokenizer) -> list[list[int]]:
    text = files("dspark.bench").joinpath("data", f"{name}.txt").read_text()
    # The text is far longer than any context, which transformers would warn about.
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    available = len(ids) // length
    if available < count:
        raise PromptError(
            f"The {name} text holds {available} prompts of {length} tokens, not {count}; "
            "ask for fewer or shorter ones."
        )
    return [ids[i * length : (i + 1) * length] for i in range(count)]
