"""`dspark demo`: serve a small model on this machine, without and with speculation.

The same prompts, Python code that the model has not seen, are completed by the target model alone
and by DSpark; the demo ends with how many drafted tokens were accepted and whether both gave the
same tokens, as they must.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from dspark import embedded
from dspark.commands.local_server import LocalServer, Output, ServerFailed

# The first and fifth of both styles: chosen neither by how well the text is drafted nor by how it
# reads.
PROMPTS = [
    prompt for kind in ("terse code", "typed code") for prompt in embedded.held_out()[kind][::4]
]
NEW_TOKENS = 96
DSPARK_FLAGS = ("--speculative-algorithm", "dspark")


class Completion(NamedTuple):
    prompt: str
    ids: list[int]
    seconds: float  # from the first token to the last
    accepted: list[int]  # entry k: verify steps that accepted k drafts; empty without speculation

    @property
    def tokens_per_second(self) -> float:
        """Decode rate; the first token, which waits for the prompt, is not counted."""
        return (len(self.ids) - 1) / self.seconds


def stream_completion(server: LocalServer, prompt: str, new_tokens: int) -> Completion:
    """Print a completion as it arrives."""
    print(f"\n> {prompt}", end="")
    shown, first, last = 0, 0.0, Output([], "", {})
    for last in server.stream(prompt, new_tokens):
        first = first or time.perf_counter()
        print(last.text[shown:], end="", flush=True)
        shown = len(last.text)
    seconds = time.perf_counter() - first
    print(f"\nids {last.ids}")
    accepted = last.meta.get("spec_correct_drafts_histogram") or []
    return Completion(prompt, last.ids, seconds, accepted)


def run_mode(checkpoint: Path, label: str, flags: Sequence[str]) -> list[Completion]:
    """Start a server with `flags`, stream every prompt, stop it again."""
    print(f"\n{label}: starting SGLang (mostly imports, half a minute or so)")
    with LocalServer(checkpoint, flags) as server:
        print(f"{label}: ready after {server.startup_s:.1f} s at {server.url}")
        completions = [stream_completion(server, prompt, NEW_TOKENS) for prompt in PROMPTS]
    for completion in completions:
        print(
            f"{label}: {len(completion.ids)} tokens, {completion.tokens_per_second:.1f} tokens/s"
            f" after the first, prompt ending in {completion.prompt[-24:]!r}"
        )
    print(f"{label}: server stopped")
    return completions


def acceptance_by_position(accepted: Sequence[int]) -> list[float]:
    """Share of verify steps that accepted at least k drafts, for k = 1 ... .

    Args:
        accepted: entry k counts the steps that accepted exactly k drafts.
    """
    steps = sum(accepted)
    return [sum(accepted[k:]) / steps for k in range(1, len(accepted))]


def add_up(histograms: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*histograms, fillvalue=0)]


def report_acceptance(completions: Sequence[Completion]) -> None:
    accepted = add_up([c.accepted for c in completions])
    steps = sum(accepted)
    if not steps:
        print("\nDSpark reported no verify step.")
        return
    per_step = sum(len(c.ids) - 1 for c in completions) / steps
    shares = "  ".join(f"{k}: {s:.0%}" for k, s in enumerate(acceptance_by_position(accepted), 1))
    print(f"\nDSpark: {per_step:.2f} tokens per verify step; accepted drafts by position  {shares}")


def report_speed(target: Sequence[Completion], dspark: Sequence[Completion]) -> None:
    """One run of each, so a hint; `dspark bench pair` measures."""
    alone, drafted = (sum(c.seconds for c in completions) for completions in (target, dspark))
    print(f"DSpark decoded {alone / drafted:.2f} times as fast as the target alone, in this run.")


def verdict(target: Sequence[Completion], dspark: Sequence[Completion]) -> bool:
    """Print whether both modes gave the same tokens, or where they first differ."""
    for alone, drafted in zip(target, dspark, strict=True):
        pairs = zip_longest(alone.ids, drafted.ids)
        for index, (expected, found) in enumerate(pairs):
            if expected != found:
                print(
                    f"DIFFERENT: token {index} of {alone.prompt!r} is {expected} without and "
                    f"{found} with DSpark."
                )
                return False
    tokens = sum(len(c.ids) for c in target)
    print(f"SAME TOKENS: all {tokens} tokens are identical with and without DSpark.")
    return True


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="dspark demo", description=__doc__)
    parser.add_argument(
        "--model-path",
        type=Path,
        help="checkpoint to serve; default: the one that ships with the package",
    )
    arguments = parser.parse_args(argv)
    try:
        checkpoint = arguments.model_path or embedded.checkpoint()
        target = run_mode(checkpoint, "target only", ())
        drafted = run_mode(checkpoint, "DSpark", DSPARK_FLAGS)
    except ServerFailed as error:
        print(f"dspark demo: {error}", file=sys.stderr)
        return 1
    report_acceptance(drafted)
    report_speed(target, drafted)
    return 0 if verdict(target, drafted) else 1
