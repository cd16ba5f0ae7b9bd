"""`dspark bench exact`: is greedy output the same token by token, whatever the server did before?

    dspark bench exact --model-path DIR [--starts 2]
    dspark bench exact --model-path DIR --server NAME=URL ...

Target-only and DSpark servers are started cold, several times each. Every server answers the same
requests twice: sent together in forward order with an empty prefix cache, then in reverse order
with what that left in the cache. All outputs are compared; at the first difference of a prompt the
target's two best tokens and the gap between their log-probabilities are reported. A gap near 0
means rounding decided; a large one means a fault.
"""

import argparse
import asyncio
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from dspark.bench import environment
from dspark.bench.client import RequestFailed, Trace, complete
from dspark.bench.difference import Difference, Outputs, first_differences
from dspark.bench.load import Target, flush_cache
from dspark.bench.measure import (
    BenchError,
    add_prompt_arguments,
    own_server,
    prompts_of,
    write_record,
)
from dspark.bench.pair import DSPARK_FLAGS
from dspark.bench.prompts import PromptError
from dspark.bench.serve import print_inputs
from dspark.commands.local_server import ServerFailed

ORDERS = ("forward", "reverse")


class Gap(NamedTuple):
    """The target's two best next tokens at a difference."""

    tokens: list[int]
    logprobs: list[float]

    @property
    def nats(self) -> float:
        return self.logprobs[0] - self.logprobs[1]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dspark bench exact",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model-path", required=True, help="checkpoint to serve")
    parser.add_argument(
        "--starts", type=int, default=2, help="cold starts of each mode, at least 2"
    )
    parser.add_argument("--target", default="", metavar="FLAGS", help="server flags of target-only")
    parser.add_argument("--dspark", default=DSPARK_FLAGS, metavar="FLAGS", help="and of DSpark")
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="also compare an SGLang server that runs already; may be repeated",
    )
    parser.add_argument("--requests", type=int, default=8, metavar="N", help="different prompts")
    parser.add_argument("--clients", type=int, default=4, metavar="C", help="requests in flight")
    add_prompt_arguments(parser)
    options = parser.parse_args(argv)
    if options.starts < 2:
        parser.error("one start cannot show that the next gives the same; use at least 2")
    if any("=" not in server for server in options.server):
        parser.error("--server takes NAME=URL")
    return options


def answers(target: Target, prompts: Sequence[list[int]], new_tokens: int, clients: int) -> Outputs:
    """Output ids by prompt; `clients` requests are in flight at a time, started in order.

    Raises:
        BenchError: the server sends no output ids.
    """

    async def run() -> list[Trace]:
        free = asyncio.Semaphore(clients)
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 22
        ) as session:

            async def one(prompt: list[int]) -> Trace:
                async with free:
                    return await complete(session, target.url, prompt, new_tokens)

            return await asyncio.gather(*map(one, prompts))

    outputs = [trace.output_ids for trace in asyncio.run(run())]
    if any(ids is None for ids in outputs):
        raise BenchError(f"{target.url} sends no output ids, so there is nothing to compare.")
    return [ids or [] for ids in outputs]


def both_orders(
    target: Target, name: str, prompts: Sequence[list[int]], new_tokens: int, clients: int
) -> dict[str, Outputs]:
    """ "NAME forward" and "NAME reverse" -> outputs in the order of `prompts`."""
    asyncio.run(flush_cache(target))
    forward = answers(target, prompts, new_tokens, clients)
    backward = answers(target, prompts[::-1], new_tokens, clients)
    print(f"{name}: {len(prompts)} requests in both orders", flush=True)
    return {f"{name} {ORDERS[0]}": forward, f"{name} {ORDERS[1]}": backward[::-1]}


def collect(options: argparse.Namespace, prompts: Sequence[list[int]]) -> dict[str, Outputs]:
    clients, new_tokens = options.clients, options.output_tokens
    runs: dict[str, Outputs] = {}
    modes = {"target-only": shlex.split(options.target), "DSpark": shlex.split(options.dspark)}
    for mode, flags in modes.items():
        for start in range(1, options.starts + 1):
            with own_server(options.model_path, flags) as target:
                runs |= both_orders(target, f"{mode} start {start}", prompts, new_tokens, clients)
    for server in options.server:
        name, _, url = server.partition("=")
        runs |= both_orders(Target(url.rstrip("/")), name, prompts, new_tokens, clients)
    return runs


def top_two(target: Target, context: list[int]) -> Gap:
    """The target's two most likely tokens after `context`."""

    async def ask() -> dict[str, Any]:
        body = {
            "input_ids": context,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        async with (
            aiohttp.ClientSession() as session,
            session.post(target.url + "/generate", json=body) as response,
        ):
            if response.status != 200:
                raise RequestFailed(f"{response.status}: {(await response.text())[:500]}")
            return await response.json()

    best = asyncio.run(ask())["meta_info"]["output_top_logprobs"][0][:2]
    return Gap([token for _, token, _ in best], [logprob for logprob, _, _ in best])


def context_of(
    difference: Difference, prompts: Sequence[list[int]], runs: Mapping[str, Outputs]
) -> list[int]:
    """Prompt and the tokens on which both runs still agreed."""
    output = runs[difference.reference][difference.prompt]
    return [*prompts[difference.prompt], *output[: difference.position]]


def explain(
    options: argparse.Namespace,
    differences: Sequence[Difference],
    prompts: Sequence[list[int]],
    runs: Mapping[str, Outputs],
) -> list[tuple[Difference, Gap]]:
    """The target's top-2 gap at each difference, asked of a fresh target-only server."""
    if not differences:
        return []
    with own_server(options.model_path, shlex.split(options.target)) as target:
        return [(d, top_two(target, context_of(d, prompts, runs))) for d in differences]


def run(options: argparse.Namespace) -> dict[str, Any]:
    prompts = prompts_of(options, options.requests, options.model_path)
    print_inputs(prompts, options.output_tokens)
    runs = collect(options, prompts.ids)
    explained = explain(options, first_differences(runs), prompts.ids, runs)
    tokens = sum(len(ids) for outputs in runs.values() for ids in outputs)
    if explained:
        print(f"DIFFERENT: {len(explained)} outputs differ.")
        for difference, gap in explained:
            print(f"  {difference}; the target's best two are {gap.tokens}, {gap.nats:.4f} apart")
    else:
        print(f"SAME TOKENS: {len(runs)} runs, {tokens} tokens, all identical.")
    return {
        "schema": 1,
        "kind": "exact",
        "environment": environment.describe(),
        "model": Path(options.model_path).name,
        "prompts": prompts.describe(),
        "output_tokens": options.output_tokens,
        "modes": {"target-only": options.target, "DSpark": options.dspark},
        "starts": options.starts,
        "runs": list(runs),
        "tokens_compared": tokens,
        "distinct_tokens": len({t for outputs in runs.values() for ids in outputs for t in ids}),
        "identical": not explained,
        "differences": [
            difference._asdict() | gap._asdict() | {"gap_nats": gap.nats}
            for difference, gap in explained
        ],
    }


def main(argv: list[str]) -> int:
    """0: all outputs agree; 1: some differ; 2: the comparison could not be made."""
    options = parse(argv)
    try:
        record = run(options)
    except (BenchError, PromptError, RequestFailed, ServerFailed, aiohttp.ClientError) as error:
        print(f"dspark bench exact: {error}", file=sys.stderr)
        return 2
    write_record(options.json, record)
    return 0 if record["identical"] else 1
