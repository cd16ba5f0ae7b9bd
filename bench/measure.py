"""What the serving benchmarks share: arguments, servers of one's own, and one measured level."""

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from dspark.bench.client import APIS
from dspark.bench.load import Load, Target, run_load, server_info
from dspark.bench.prompts import SETS, PromptSet, Tokenizer, load_tokenizer, make_prompts
from dspark.bench.throughput import Figures, summarise
from dspark.commands.local_server import LocalServer

WARM_UP_TOKENS = 16
# SGLang updates its own throughput figure once in so many steps; its default of 40 is coarse.
LOG_INTERVAL = "--decode-log-interval"
DEFAULT_LOG_INTERVAL = "8"


class BenchError(RuntimeError):
    """The benchmark cannot give a result; one sentence."""


class Level(NamedTuple):
    figures: Figures
    ids: list[list[int] | None]  # output ids by prompt


def add_concurrency_argument(parser: argparse.ArgumentParser, default: list[int]) -> None:
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=default, metavar="C", help="clients at once"
    )


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", choices=SETS, default="code", help="prompt set")
    parser.add_argument("--input-tokens", type=int, default=256, metavar="N")
    parser.add_argument("--output-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="of synthetic prompts")
    parser.add_argument("--tokenizer", help="checkpoint whose tokenizer to use; else the model's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the full record here")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api", choices=APIS, default="sglang", help="protocol of --url")
    parser.add_argument("--model", default="default", help="model name for --api openai")


def prompts_of(options: argparse.Namespace, count: int, model_path: str | None) -> PromptSet:
    tokenizer: Tokenizer = load_tokenizer(options.tokenizer or model_path)
    return make_prompts(options.prompts, count, options.input_tokens, tokenizer, options.seed)


def model_path_of(target: Target) -> str | None:
    """The checkpoint a running SGLang server serves; None for others."""
    return info(target).get("model_path")


def info(target: Target) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with aiohttp.ClientSession() as session:
            return await server_info(session, target)

    return asyncio.run(ask())


@contextlib.contextmanager
def own_server(model_path: str, flags: Sequence[str]) -> Iterator[Target]:
    """A server for the time of the `with` block; its log is kept only when it fails to start."""
    given = any(flag.partition("=")[0] == LOG_INTERVAL for flag in flags)
    flags = [*flags] if given else [*flags, LOG_INTERVAL, DEFAULT_LOG_INTERVAL]
    handle, name = tempfile.mkstemp(prefix="dspark-bench-", suffix=".log")
    os.close(handle)
    with LocalServer(model_path, flags, log=Path(name), ready_s=1200) as server:
        yield Target(server.url)
    Path(name).unlink()


def warm_up(target: Target, prompts: Sequence[list[int]], new_tokens: int) -> None:
    """One discarded run, so that compilation and first allocations are not measured."""
    run_load(target, prompts, min(new_tokens, WARM_UP_TOKENS))


def measure(target: Target, prompts: Sequence[list[int]], new_tokens: int) -> Level:
    """BenchError when a request did not produce the tokens it was asked for."""
    load = run_load(target, prompts, new_tokens)
    check_complete(load, new_tokens)
    return Level(
        summarise(load.traces, load.release, load.scheduler_samples),
        [trace.output_ids for trace in load.traces],
    )


def check_complete(load: Load, new_tokens: int) -> None:
    for number, trace in enumerate(load.traces):
        if trace.tokens != new_tokens:
            raise BenchError(
                f"Request {number} produced {trace.tokens} tokens instead of {new_tokens}; "
                "the server ignored ignore_eos or its limits are smaller."
            )


def write_record(file: Path | None, record: dict[str, Any]) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1) + "\n")
        print(f"Wrote {file}.")
