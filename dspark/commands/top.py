"""`dspark top`: what a running server does, once a second, in the terminal.

Everything shown comes from SGLang's `/server_info` and `/v1/loads`, which a server answers with
and without `--enable-metrics`. Rates are differences of its counters.
"""

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import requests
from rich.cells import set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

BAR = 24  # characters of a full bar
TIMEOUT_S = 30  # a server answers between two steps
NAME = 24  # characters of a request's name
KEPT = 3  # states of the counters: a rate is of the oldest and the newest


class NoAnswer(RuntimeError):
    """The server cannot be asked; the message is one sentence."""


class Counters(NamedTuple):
    """What only grows while a server lives."""

    at: float  # seconds of its clock
    steps: float  # decode steps, each from its launch to the next one's
    step_us: float  # all of them together
    decoded: float  # tokens that they delivered
    prompts: float  # prompt tokens computed, those of the cache not counted


class Snapshot(NamedTuple):
    """One moment of a server."""

    model: str
    ranks: str | None  # how they sum; None for a single one
    running: int
    waiting: int
    most: int  # requests at once
    used: int  # tokens of the pool
    tokens: int  # that the pool holds
    fullest: float  # share in use of the fullest part of the pool
    counters: Counters
    drafting: Mapping[str, Any] | None  # the `dspark` section with speculation, else None
    requests: Sequence[Mapping[str, Any]]  # the section's, those that decode


class Rates(NamedTuple):
    """None where the counters have not moved yet."""

    decoded: float | None  # tokens/s
    prompts: float | None  # tokens/s
    step_ms: float | None


def ask(url: str, key: str | None) -> Snapshot:
    """Raises NoAnswer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    def get(path: str) -> Any:
        try:
            answer = requests.get(url + path, headers=headers, timeout=TIMEOUT_S)
            if answer.status_code == 401:
                raise NoAnswer(f"{url} wants {'another' if key else 'an'} --api-key.")
            if not answer.ok:
                raise NoAnswer(f"{url}{path} answers {answer.status_code} {answer.reason}.")
            return answer.json()
        except requests.ReadTimeout:
            raise NoAnswer(f"{url} has not answered for {TIMEOUT_S} s.") from None
        except (requests.RequestException, ValueError):
            raise NoAnswer(f"No SGLang server answers at {url}.") from None

    return read(get("/server_info"), get("/v1/loads"))


def read(info: Mapping[str, Any], loads: Mapping[str, Any]) -> Snapshot:
    """What is shown, out of both answers.

    Raises:
        NoAnswer: they are not a server's with this plugin.
    """
    try:
        state, load = info["internal_states"][0], loads["loads"][0]
        section = state["dspark"]
        return Snapshot(
            str(info.get("served_model_name") or info["model_path"]),
            f"{info['tp_size']}, sums {section['routes']['rank_sums']}"
            if info["tp_size"] > 1
            else None,
            load["num_running_reqs"],
            load["num_waiting_reqs"],
            load["max_running_requests"],
            load["num_used_tokens"],
            load["max_total_num_tokens"],
            load["token_usage"],
            counters(load),
            section if "verify_steps" in section else None,
            section["requests"],
        )
    except (KeyError, IndexError, TypeError) as error:
        raise NoAnswer(f"The server is none of this plugin's: {error!r} is missing.") from None


def counters(load: Mapping[str, Any]) -> Counters:
    """`decode_moments`: steps, sum of requests, microseconds, two of squares, tokens."""
    steps, _, step_us, _, _, decoded = load.get("decode_moments") or [0.0] * 6
    prompts = load["total_prefill_uncached_tokens"]
    return Counters(load["timestamp"], steps, step_us, decoded, prompts)


def rates(before: Counters, now: Counters) -> Rates:
    """before: taken earlier, of the same server."""
    seconds, steps = now.at - before.at, now.steps - before.steps
    if seconds <= 0:
        return Rates(None, None, None)
    return Rates(
        (now.decoded - before.decoded) / seconds,
        (now.prompts - before.prompts) / seconds,
        (now.step_us - before.step_us) / steps / 1e3 if steps else None,
    )


def bar(share: float) -> str:
    full = round(min(max(share, 0.0), 1.0) * BAR)
    return "█" * full + "░" * (BAR - full)


def frame(before: Snapshot, now: Snapshot, height: int) -> list[Text]:
    """One text a line, at most `height` of them where that is enough for all but the requests."""
    lines = [Text(now.model, style="bold"), *map(Text, of_server(before, now))]
    if now.drafting is not None:
        lines += of_drafts(now.drafting)
    else:
        lines.append(Text("target-only: no drafts"))
    return lines + [Text(line) for line in of_requests(now.requests, height - len(lines))]


def of_server(before: Snapshot, now: Snapshot) -> Iterator[str]:
    yield line("requests", now.running / now.most, f"{now.running} of {now.most} at once")
    yield line("pool", now.used / now.tokens, f"{now.used:,} of {now.tokens:,} tokens")
    yield line("fullest", now.fullest, f"{now.fullest:.0%} of the pool's fullest part")
    rate = rates(before.counters, now.counters)
    yield f"{'decoding':<10}{figure(rate.decoded)} tokens/s, {figure(rate.step_ms)} ms a step"
    yield f"{'prompts':<10}{figure(rate.prompts)} tokens/s, {now.waiting} waiting"
    if now.ranks:
        yield f"{'ranks':<10}{now.ranks}"


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def line(name: str, share: float, words: str) -> str:
    return f"{name:<10}{bar(share)}  {words}"


def of_drafts(section: Mapping[str, Any]) -> Iterator[Text]:
    """Acceptance since the server started, or since its counters were cleared."""
    if not section["verify_steps"]:
        yield Text("no verify step yet")
        return
    run, saved = section["verify_rows_run"], section["verify_rows_saved"]
    yield Text(
        f"{'drafts':<10}{section['mean_accepted_length']:.2f} tokens a verify step, "
        f"{section['verify_steps']:,} steps, {saved / (run + saved):.0%} of rows saved"
    )
    for k, share in enumerate(section["acceptance_per_position"], start=1):
        yield Text(line(f"draft {k}", share, f"{share:.0%}"))
    if section["steps_without_draft"]:
        yield Text(f"{'paused':<10}{section['steps_without_draft']:,} steps without drafts")
    if section["warning"]:
        yield Text(f"stuck: {section['warning']}", style="bold red")


def of_requests(rows: Sequence[Mapping[str, Any]], height: int) -> Iterator[str]:
    """Under a header; the last line counts those that do not fit. Nothing in fewer than 3 lines."""
    if not rows or height < 3:
        return
    yield f"{'request':<{NAME}}  prompt  written  tokens a step  rows a step"
    shown = rows if len(rows) < height else rows[: height - 2]
    for row in shown:
        yield (
            f"{printable(row['rid'])}{row['prompt']:>8}{row['written']:>9}"
            f"{per_step(row, 'delivered'):>15}{per_step(row, 'rows'):>13}"
        )
    if len(shown) < len(rows):
        yield f"and {len(rows) - len(shown)} more"


def per_step(row: Mapping[str, Any], what: str) -> str:
    return f"{row[what] / row['steps']:.2f}" if row["steps"] else "-"


def printable(name: str) -> str:
    """A client chose this name: no control character of it reaches the terminal."""
    plain = "".join(character if character.isprintable() else "?" for character in name)
    return set_cell_size(plain, NAME)


def keep(seen: deque[Snapshot], taken: Snapshot) -> None:
    """The server writes its counters every few steps: what has not moved replaces the last."""
    if seen and seen[-1].counters.at == taken.counters.at:
        seen.pop()
    seen.append(taken)


def watch(take: Callable[[], Snapshot], console: Console, every_s: float) -> None:
    """Until it is interrupted, or the server is gone (NoAnswer). The last frame stays."""
    seen: deque[Snapshot] = deque(maxlen=KEPT)
    keep(seen, take())
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(shown(seen[0], seen[-1], console), refresh=True)
                time.sleep(every_s)
                keep(seen, take())
    finally:
        console.print(shown(seen[0], seen[-1], console))


def shown(before: Snapshot, now: Snapshot, console: Console) -> RenderableType:
    lines = frame(before, now, console.height - 1)  # the cursor's line is not ours
    for text in lines:
        text.truncate(console.width, overflow="ellipsis")
    return Group(*lines)


def positive(text: str) -> float:
    """Of the command line; argparse makes a sentence of the ValueError."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="dspark top",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--api-key", metavar="KEY", help="where the server wants one")
    parser.add_argument(
        "--every", type=positive, default=1.0, metavar="SECONDS", help="between frames (1)"
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    arguments = parser.parse_args(argv)
    console = Console(highlight=False)

    def take() -> Snapshot:
        return ask(arguments.url.rstrip("/"), arguments.api_key)

    try:
        if arguments.once:
            before = take()
            time.sleep(arguments.every)
            console.print(shown(before, take(), console))
        else:
            watch(take, console, arguments.every)
    except NoAnswer as error:
        print(f"dspark top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0
