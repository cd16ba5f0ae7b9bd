"""Build the corpus: Python source and prose that every machine has or PyPI ships.

Sources are the standard library of the running interpreter and installed packages with a
permissive licence. Everything is derived from file contents, so the same versions give the same
tokens; the manifest records versions, licences, counts and hashes.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, NOISE = "<|bos|>", "<|eos|>", "<|noise|>"
# Import name: licence. Test suites are kept: they are code, too.
PACKAGES = {
    "IPython": "BSD-3-Clause",
    "aiohttp": "Apache-2.0",
    "anyio": "MIT",
    "fastapi": "MIT",
    "huggingface_hub": "Apache-2.0",
    "mypy": "MIT",
    "networkx": "BSD-3-Clause",
    "numpy": "BSD-3-Clause",
    "prompt_toolkit": "BSD-3-Clause",
    "pydantic": "MIT",
    "rich": "MIT",
    "starlette": "BSD-3-Clause",
    "sympy": "BSD-3-Clause",
    "torch": "BSD-3-Clause",
    "transformers": "Apache-2.0",
}
DOCUMENTED = ("networkx", "numpy")  # their docstrings count as prose, too
SKIPPED = re.compile(
    r"site-packages|/_vendor/|/_distutils/|/lib2to3/tests/data/|/bad_?\w*\.py$|/__pycache__/"
    r"|/encodings/|/idlelib/|/pydoc_data/|/test/\w*_data|/models/\w+/(modular|convert|tokeniz)"
)
MAX_FILE_BYTES, MIN_FILE_BYTES = 150_000, 200
HELD_OUT_ONE_IN = 20  # of the standard library's modules and of the prose
TOKENIZER_BYTES = 12_000_000  # a sample is enough for 2000 merges


class Document(NamedTuple):
    part: str  # stdlib, packages, prose, heldout_code or heldout_prose
    text: str


def build(directory: Path, vocab_size: int, max_documents: int | None = None) -> dict:
    """Write tokenizer.json, tokens.npz and manifest.json; returns the manifest.

    max_documents: per source, for tests.
    """
    kept = [d for d in documents(max_documents) if len(d.text) >= MIN_FILE_BYTES]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer([d.text for d in kept if "heldout" not in d.part], vocab_size)
    tokenizer.save(str(directory / "tokenizer.json"))
    parts = ("stdlib", "packages", "prose", "heldout_code", "heldout_prose")
    streams = {part: _encode(tokenizer, [d.text for d in kept if d.part == part]) for part in parts}
    np.savez_compressed(directory / "tokens.npz", allow_pickle=False, **streams)
    manifest = {
        "python": platform.python_version(),
        "licences": {"Python standard library": "PSF-2.0"} | PACKAGES,
        "versions": {name: _version(name) for name in PACKAGES},
        "documents": {part: sum(d.part == part for d in kept) for part in parts},
        "characters": {part: sum(len(d.text) for d in kept if d.part == part) for part in parts},
        "tokens": {part: len(stream) for part, stream in streams.items()},
        "sha256": {
            part: hashlib.sha256(stream.tobytes()).hexdigest() for part, stream in streams.items()
        },
    }
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; ids 0 and 1 are BOS and EOS, the last one is the draft's noise token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(texts), trainer)
    if tokenizer.get_vocab_size() > vocab_size - 1:
        raise ValueError(f"{vocab_size} tokens do not hold the byte alphabet.")
    # A small corpus may yield fewer merges: fill up, so that the noise token stays the last one.
    fillers = [f"<|unused{i}|>" for i in range(vocab_size - 1 - tokenizer.get_vocab_size())]
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in [*fillers, NOISE]])
    return tokenizer


def _sample(texts: list[str]) -> list[str]:
    """Every n-th text, about `TOKENIZER_BYTES` in all."""
    step = max(1, sum(map(len, texts)) // TOKENIZER_BYTES)
    return texts[::step]


def _encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """u16 [n]: BOS, tokens, EOS of every text."""
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    pieces = []
    for i in range(0, len(texts), 256):
        for encoding in tokenizer.encode_batch(texts[i : i + 256]):
            pieces.append(np.array([bos, *encoding.ids, eos], dtype=np.uint16))
    return np.concatenate(pieces) if pieces else np.zeros(0, np.uint16)


def documents(limit: int | None = None) -> Iterator[Document]:
    """Documents of all sources in a fixed order, each text once."""
    seen: set[bytes] = set()
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    library = list(_source_files(stdlib, limit, seen))
    modules = [t for t, file in library if "test" not in file.relative_to(stdlib).parts[0]]
    held_out = _held_out(modules)
    for text, _ in library:
        yield Document("heldout_code" if text in held_out else "stdlib", text)
        yield Document("heldout_prose" if text in held_out else "prose", docstrings(text))
    topics = _topics(limit)
    held_out = _held_out(topics)
    for text in topics:
        yield Document("heldout_prose" if text in held_out else "prose", text)
    for name in PACKAGES:
        for text, _ in _source_files(_package_directory(name), limit, seen):
            yield Document("packages", text)
            if name in DOCUMENTED:
                yield Document("prose", docstrings(text))


def _source_files(
    directory: Path, limit: int | None, seen: set[bytes]
) -> Iterator[tuple[str, Path]]:
    taken = 0
    for file in sorted(directory.rglob("*.py")):
        if SKIPPED.search(f"/{file.relative_to(directory)}"):
            continue
        if not MIN_FILE_BYTES <= file.stat().st_size <= MAX_FILE_BYTES:
            continue
        try:
            text = file.read_text(encoding="utf-8").replace("\r\n", "\n").expandtabs(8)
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen or not _looks_written(text):
            continue
        seen.add(digest)
        yield text, file
        taken += 1
        if taken == limit:
            return


def _looks_written(text: str) -> bool:
    """No generated table: ASCII, ordinary lines, not mostly digits."""
    lines = text.count("\n") + 1
    digits = sum(map(text.count, "0123456789"))
    return text.isascii() and len(text) / lines < 80 and digits < 0.1 * len(text)


def docstrings(source: str) -> str:
    """All docstrings of a module, cleaned as `help()` shows them; empty if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in test files
            tree = ast.parse(source)
    except SyntaxError:
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(text for text in found if text)


def _topics(limit: int | None) -> list[str]:
    """The language reference, by topic, as `help()` prints it."""
    from pydoc_data.topics import topics

    return [text for _, text in sorted(topics.items())][:limit]


def _held_out(texts: list[str]) -> set[str]:
    """The texts whose hash falls into one of `HELD_OUT_ONE_IN` classes; at least one."""
    hashes = {t: int.from_bytes(hashlib.sha256(t.encode()).digest()[:4], "big") for t in texts}
    chosen = {t for t in texts if hashes[t] % HELD_OUT_ONE_IN == 0}
    return chosen or {min(texts, key=hashes.__getitem__)}


def _package_directory(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"The corpus needs the package {name}, which is not installed.")
    return Path(next(iter(spec.submodule_search_locations)))


def _version(name: str) -> str:
    return importlib.metadata.version({"huggingface_hub": "huggingface-hub"}.get(name, name))
