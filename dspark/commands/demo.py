"""`dspark demo`: serve a small model on this machine, without and with speculation.

The same prompts, Python code that the model has not seen, are completed by the target model alone
and by DSpark, greedily and once by chance under a fixed seed. The report leads with whether both
modes gave the same tokens, as they must; then how fast, how many drafts were accepted, and what
was written.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from dspark import embedded
from dspark.commands.local_server import LocalServer, ServerFailed

# The first and fifth of both styles: chosen neither by how well the text is drafted nor by how it
# reads.
PROMPTS = [
    prompt for kind in ("terse code", "typed code") for prompt in embedded.held_out()[kind][::4]
]
NEW_TOKENS = 96
SAMPLED = {"temperature": 0.8, "sampling_seed": 2026}
DSPARK_FLAGS = ("--speculative-algorithm", "dspark")
SHOWN_LINES, SHOWN_COLUMNS = 8, 96  # of each prompt's end and of each completion
WHY_IT_REPEATS = (
    "A model of 12.6 million parameters knows how code looks, not what it means; greedily it soon\n"
    "repeats itself. What the demo shows is that speculation leaves every token as it was."
)


class Completion(NamedTuple):
    prompt: str
    text: str
    ids: list[int]
    seconds: float  # from the first token to the last
    accepted: list[int]  # entry k: verify steps that accepted k drafts; empty without speculation
    sampled: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Decode rate; the first token, which waits for the prompt, is not counted."""
        return (len(self.ids) - 1) / self.seconds


class Difference(NamedTuple):
    prompt: str
    place: int
    alone: int | None  # token ids; None where that mode ended earlier
    drafted: int | None


def complete(server: LocalServer, prompt: str, sampling: dict[str, Any]) -> Completion:
    stream = server.stream(prompt, NEW_TOKENS, **sampling)
    events = [(time.perf_counter(), output) for output in stream]
    (first, _), (end, last) = events[0], events[-1]
    accepted = last.meta.get("spec_correct_drafts_histogram") or []
    return Completion(prompt, last.text, last.ids, end - first, accepted, sampled=bool(sampling))


def run_mode(checkpoint: Path, label: str, flags: Sequence[str]) -> list[Completion]:
    """Start a server with `flags`, complete every prompt greedily and the first by chance."""
    print(f"{label}: starting SGLang (mostly imports, half a minute or so)", flush=True)
    completions = []
    with LocalServer(checkpoint, flags) as server:
        print(f"{label}: ready after {server.startup_s:.1f} s", flush=True)
        for prompt, sampling in [*((prompt, {}) for prompt in PROMPTS), (PROMPTS[0], SAMPLED)]:
            done = complete(server, prompt, sampling)
            how = "sampled" if done.sampled else "greedy"
            rate = f"{done.tokens_per_second:6.1f} tokens/s"
            print(f"{label}: {len(done.ids)} tokens, {how:7} {rate}", flush=True)
            completions.append(done)
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


def first_difference(
    target: Sequence[Completion], drafted: Sequence[Completion]
) -> Difference | None:
    for alone, other in zip(target, drafted, strict=True):
        for index, (expected, found) in enumerate(zip_longest(alone.ids, other.ids)):
            if expected != found:
                return Difference(alone.prompt, index, expected, found)
    return None


def verdict(target: Sequence[Completion], drafted: Sequence[Completion]) -> str:
    """Whether both modes gave the same tokens, or where they first differ."""
    if difference := first_difference(target, drafted):
        return (
            f"DIFFERENT: token {difference.place} of {difference.prompt!r} is {difference.alone} "
            f"without and {difference.drafted} with DSpark."
        )
    greedy, sampled = (
        sum(len(c.ids) for c in target if c.sampled == kind) for kind in (False, True)
    )
    return (
        f"SAME TOKENS: all {greedy + sampled} tokens are identical with and without DSpark "
        f"({greedy} greedy, {sampled} sampled under a seed)."
    )


def speed(target: Sequence[Completion], drafted: Sequence[Completion]) -> str:
    """Of the greedy ones; one run of each, so a hint (`dspark bench pair` measures)."""
    seconds = [
        sum(c.seconds for c in completions if not c.sampled) for completions in (target, drafted)
    ]
    tokens = sum(len(c.ids) - 1 for c in target if not c.sampled)
    rates = [tokens / s for s in seconds]
    return (
        f"Decoding: {rates[0]:.1f} tokens/s by the target alone, {rates[1]:.1f} with DSpark: "
        f"{rates[1] / rates[0]:.2f}x in this run, greedy, one request at a time."
    )


def acceptance(drafted: Sequence[Completion]) -> str:
    """Of the greedy ones."""
    greedy = [c for c in drafted if not c.sampled]
    accepted = add_up([c.accepted for c in greedy])
    if not sum(accepted):
        return "DSpark reported no verify step."
    per_step = sum(len(c.ids) - 1 for c in greedy) / sum(accepted)
    shares = ", ".join(f"{k}: {s:.0%}" for k, s in enumerate(acceptance_by_position(accepted), 1))
    return f"Drafts: {per_step:.2f} tokens a verify step; accepted by position {shares}."


def passage(completion: Completion) -> str:
    """The prompt's end behind '>', and what was written behind '|'."""
    how = f"sampled at temperature {SAMPLED['temperature']}" if completion.sampled else "greedy"
    lines = [f"-- {how}"]
    lines += [f"> {line}" for line in completion.prompt.splitlines()[-SHOWN_LINES:]]
    written = completion.text.splitlines()
    lines += [f"| {line}" for line in written[:SHOWN_LINES]]
    if len(written) > SHOWN_LINES:
        lines.append(f"| ... {len(written) - SHOWN_LINES} more lines")
    return "\n".join(line[:SHOWN_COLUMNS] for line in lines)


def report(target: Sequence[Completion], drafted: Sequence[Completion]) -> str:
    head = [verdict(target, drafted), speed(target, drafted), acceptance(drafted)]
    return "\n".join(
        [*head, "", "Prompts end with the lines behind '>', the model wrote those behind '|':"]
        + [passage(completion) for completion in drafted]
        + ["", WHY_IT_REPEATS]
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="dspark demo", description=__doc__)
    parser.add_argument(
        "--model-path",
        type=Path,
        help="checkpoint to serve; default: the one that ships with the package",
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="also write the report there")
    arguments = parser.parse_args(argv)
    try:
        checkpoint = arguments.model_path or embedded.checkpoint()
        target = run_mode(checkpoint, "target only", ())
        drafted = run_mode(checkpoint, "DSpark     ", DSPARK_FLAGS)
    except ServerFailed as error:
        print(f"dspark demo: {error}", file=sys.stderr)
        return 1
    said = report(target, drafted)
    print(f"\n{said}")
    if arguments.record:
        arguments.record.write_text(f"$ dspark demo\n{said}\n")
    return 1 if first_difference(target, drafted) else 0
