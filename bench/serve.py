"""`dspark bench serve`: throughput, latency and acceptance of one server.

    dspark bench serve --model-path DIR -- --speculative-algorithm dspark
    dspark bench serve --url http://HOST:PORT [--api openai --model NAME --tokenizer DIR]

Clients are released together and decode greedily to a fixed length. Everything after `--` goes to
the server that is started for the run.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from dspark.bench import environment
from dspark.bench.client import RequestFailed
from dspark.bench.load import Target
from dspark.bench.measure import (
    BenchError,
    add_concurrency_argument,
    add_prompt_arguments,
    add_server_arguments,
    info,
    measure,
    model_path_of,
    own_server,
    prompts_of,
    warm_up,
    write_record,
)
from dspark.bench.prompts import PromptError, PromptSet
from dspark.bench.table import number, table
from dspark.bench.throughput import THROUGHPUTS, Figures, scaling
from dspark.commands.local_server import ServerFailed

# Settings of a running server that a reader needs to repeat the run.
RECORDED = (
    "version", "tp_size", "device", "dtype", "kv_cache_dtype", "page_size",
    "attention_backend", "speculative_algorithm", "speculative_num_draft_tokens",
    "chunked_prefill_size", "max_running_requests", "disable_cuda_graph", "disable_radix_cache",
)  # fmt: skip


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Own arguments and, after `--`, those of the server."""
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    own, flags = split_flags(argv)
    parser = argparse.ArgumentParser(
        prog="dspark bench serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a server that runs already")
    where.add_argument("--model-path", help="checkpoint to serve for this run")
    add_server_arguments(parser)
    add_concurrency_argument(parser, [1, 2, 4, 8])
    add_prompt_arguments(parser)
    options = parser.parse_args(own)
    if flags and options.url:
        parser.error("server flags after -- need --model-path; a running server has its own")
    return options, flags


def print_levels(levels: Sequence[Figures]) -> None:
    single = next((level for level in levels if level.concurrency == 1), None)
    header = [
        "C", "scheduler", "window", "end-to-end", "of linear", "acc.len", "step ms",
        "TTFT p50", "p99", "ITL p50", "p99 ms",
    ]  # fmt: skip
    rows = []
    for level in levels:
        shares = "/".join(
            "-" if share is None else f"{share:.0%}" for share in scaling(level, single).values()
        )
        rows.append(
            [
                str(level.concurrency),
                *(number(getattr(level, name)) for name in THROUGHPUTS),
                shares,
                number(level.accepted_length, 2),
                number(level.step_time, 2, 1e3),
                *(number(level.ttft.get(p), 0, 1e3) for p in ("p50", "p99")),
                *(number(level.itl.get(p), 1, 1e3) for p in ("p50", "p99")),
            ]
        )
    print("Throughput in tokens/s: scheduler output, decode window, end to end; share of C x C1.")
    print(table(header, rows))


def print_inputs(prompts: PromptSet, new_tokens: int) -> None:
    kind = "SYNTHETIC random ids" if prompts.name == "synthetic" else f"{prompts.name} text"
    print(
        f"{kind}, {len(prompts.ids[0])} input and {new_tokens} output tokens, "
        f"prompt hash {prompts.sha256[:16]}"
    )


def run(options: argparse.Namespace, target: Target, flags: list[str] | None) -> dict[str, Any]:
    model_path = options.model_path or model_path_of(target)
    prompts = prompts_of(options, max(options.concurrency), model_path)
    print_inputs(prompts, options.output_tokens)
    warm_up(target, prompts.ids, options.output_tokens)
    levels = []
    for clients in options.concurrency:
        level = measure(target, prompts.ids[:clients], options.output_tokens)
        levels.append(level.figures)
    print_levels(levels)
    single = next((level for level in levels if level.concurrency == 1), None)
    settings = info(target)
    return {
        "schema": 1,
        "kind": "serve",
        "environment": environment.describe(flags),
        "server": {name: settings[name] for name in RECORDED if name in settings},
        "model": Path(model_path).name if model_path else options.model,
        "prompts": prompts.describe(),
        "output_tokens": options.output_tokens,
        "levels": [level._asdict() | {"of_linear": scaling(level, single)} for level in levels],
    }


def main(argv: list[str]) -> int:
    options, flags = parse(argv)
    try:
        with contextlib.ExitStack() as stack:
            if options.url:
                target = Target(options.url.rstrip("/"), options.api, options.model)
                record = run(options, target, None)
            else:
                target = stack.enter_context(own_server(options.model_path, flags))
                record = run(options, target, flags)
    except (BenchError, PromptError, RequestFailed, ServerFailed, aiohttp.ClientError) as error:
        print(f"dspark bench serve: {error}", file=sys.stderr)
        return 2
    write_record(options.json, record)
    return 0
