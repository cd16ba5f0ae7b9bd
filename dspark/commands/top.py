"""`dspark top`: what a running server does, once a second, in the terminal.

Everything shown comes from SGLang's `/server_info` and `/v1/loads`; tokens/s are the server's own
count of its last decode steps.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import requests
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

BAR = 24  # characters of a full bar
TIMEOUT_S = 5


class NoAnswer(RuntimeError):
    """The server cannot be asked; the message is one sentence."""


class Snapshot(NamedTuple):
    """One moment of a server."""

    model: str
    running: int
    waiting: int
    most: int  # requests at once
    used: int  # tokens of the pool
    tokens: int  # that the pool holds
    tokens_per_second: float
    drafting: Mapping[str, Any] | None  # the `dspark` section with speculation, else None


def ask(url: str, key: str | None) -> Snapshot:
    """Raises NoAnswer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    def get(path: str) -> Any:
        try:
            answer = requests.get(url + path, headers=headers, timeout=TIMEOUT_S)
            if not answer.ok:
                raise NoAnswer(f"{url}{path} answers {answer.status_code} {answer.reason}.")
            return answer.json()
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
            load["num_running_reqs"],
            load["num_waiting_reqs"],
            load["max_running_requests"],
            load["num_used_tokens"],
            load["max_total_num_tokens"],
            load["gen_throughput"],
            section if "verify_steps" in section else None,
        )
    except (KeyError, IndexError, TypeError) as error:
        raise NoAnswer(f"The server is none of this plugin's: {error!r} is missing.") from None


def bar(share: float) -> str:
    full = round(min(max(share, 0.0), 1.0) * BAR)
    return "█" * full + "░" * (BAR - full)


def frame(now: Snapshot) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column()

    def add(name: str, share: float | None, words: str) -> None:
        table.add_row(name, "" if share is None else bar(share), words)

    add("requests", now.running / now.most, f"{now.running} of {now.most}, {now.waiting} waiting")
    add("pool", now.used / now.tokens, f"{now.used:,} of {now.tokens:,} tokens")
    add("decoding", None, f"{now.tokens_per_second:,.1f} tokens/s")
    return Group(Text(now.model, style="bold"), table, *drafts(now.drafting))


def drafts(section: Mapping[str, Any] | None) -> list[RenderableType]:
    """Acceptance since the server started, or since its counters were cleared."""
    if section is None:
        return [Text("target-only: no drafts")]
    if not section["verify_steps"]:
        return [Text("no verify step yet")]
    run, saved = section["verify_rows_run"], section["verify_rows_saved"]
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column()
    for k, share in enumerate(section["acceptance_per_position"], start=1):
        table.add_row(f"draft {k}", bar(share), f"{share:.0%}")
    lines: list[RenderableType] = [
        Text(
            f"drafts: {section['mean_accepted_length']:.2f} tokens a verify step, "
            f"{section['verify_steps']:,} steps, {saved / (run + saved):.0%} of the rows saved"
        ),
        table,
    ]
    if section["warning"]:
        lines.append(Text(f"stuck: {section['warning']}", style="bold red"))
    return lines


def watch(take: Callable[[], Snapshot], console: Console, every_s: float) -> None:
    """Until it is interrupted, or the server is gone (NoAnswer)."""
    with Live(frame(take()), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(frame(take()), refresh=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="dspark top", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--api-key", help="where the server wants one")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    arguments = parser.parse_args(argv)
    console = Console(highlight=False)

    def take() -> Snapshot:
        return ask(arguments.url.rstrip("/"), arguments.api_key)

    try:
        if arguments.once:
            console.print(frame(take()))
        else:
            watch(take, console, arguments.every)
    except NoAnswer as error:
        print(f"dspark top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0
