"""`dspark demo`: serve a small model on this machine and stream two completions."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dspark.local_server import LocalServer, Output, ServerFailed
from dspark.target.checkpoint import presets
from dspark.target.checkpoint.make import make_checkpoint

CHECKPOINT = Path(".cache/demo/tiny")
PROMPTS = ("The quick brown fox", "Speculative decoding")
NEW_TOKENS = 64


class Completion(NamedTuple):
    prompt: str
    ids: list[int]
    text: str
    seconds: float  # from the first token to the last

    @property
    def tokens_per_second(self) -> float:
        """Decode rate; the first token, which waits for the prompt, is not counted."""
        return (len(self.ids) - 1) / self.seconds


def reuse_or_make(directory: Path) -> Path:
    """A directory that exists is complete: `make_checkpoint` renames it into place."""
    if not directory.exists():
        print(f"Writing a random checkpoint of 9.5 M parameters to {directory}.")
        make_checkpoint(directory, presets.tiny())
    return directory


def stream_completion(server: LocalServer, prompt: str, new_tokens: int) -> Completion:
    """Print a completion as it arrives."""
    print(f"\n> {prompt}")
    shown, first, last = 0, 0.0, Output([], "", {})
    for last in server.stream(prompt, new_tokens):
        first = first or time.perf_counter()
        print(last.text[shown:], end="", flush=True)
        shown = len(last.text)
    seconds = time.perf_counter() - first
    print(f"\nids {last.ids}")
    return Completion(prompt, last.ids, last.text, seconds)


def run_mode(checkpoint: Path, label: str, flags: Sequence[str]) -> list[Completion]:
    """Start a server with `flags`, stream every prompt, stop it again."""
    print(f"\n{label}: starting SGLang (mostly imports, half a minute or so)")
    with LocalServer(checkpoint, flags) as server:
        print(f"{label}: ready after {server.startup_s:.1f} s at {server.url}")
        completions = [stream_completion(server, prompt, NEW_TOKENS) for prompt in PROMPTS]
    for completion in completions:
        print(
            f"{label}: {len(completion.ids)} tokens, {completion.tokens_per_second:.1f} tokens/s"
            f" after the first, for {completion.prompt!r}"
        )
    print(f"{label}: server stopped")
    return completions


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="dspark demo", description=__doc__)
    parser.add_argument(
        "--model-path", type=Path, help="checkpoint to serve; a small one is made if left out"
    )
    arguments = parser.parse_args(argv)
    try:
        run_mode(arguments.model_path or reuse_or_make(CHECKPOINT), "target", [])
    except ServerFailed as error:
        print(f"dspark demo: {error}", file=sys.stderr)
        return 1
    return 0
