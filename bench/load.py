"""Clients that start together: one request each, released by a barrier."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp

from dspark.bench.client import Trace, complete
from dspark.commands.local_server import IDLE_S

SAMPLE_S = 0.25


class Target(NamedTuple):
    """A server to measure."""

    url: str
    api: str = "sglang"
    model: str = "default"
    temperature: float = 0  # above 0 each client draws by a seed of its own


class Load(NamedTuple):
    """One run at one concurrency."""

    release: float  # time.perf_counter() seconds: all clients start
    traces: list[Trace]  # in the order of the prompts
    scheduler_samples: list[float]  # tokens/s, the server's own figure; empty if it has none
    cache_flushed: bool


def run_load(target: Target, prompts: Sequence[list[int]], new_tokens: int) -> Load:
    """Send all prompts at once, each from a client of its own.

    Raises:
        RequestFailed, aiohttp.ClientError: any request failed; a partial run is no result.
    """
    return asyncio.run(_run_load(target, prompts, new_tokens))


async def _run_load(target: Target, prompts: Sequence[list[int]], new_tokens: int) -> Load:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, read_bufsize=1 << 22
    ) as session:
        flushed = await flush_cache(target)
        barrier = asyncio.Barrier(len(prompts) + 1)

        async def client(seed: int, prompt: list[int]) -> Trace:
            await barrier.wait()
            url, api, model, temperature = target
            return await complete(session, url, prompt, new_tokens, api, model, temperature, seed)

        clients = [asyncio.create_task(client(*numbered)) for numbered in enumerate(prompts)]
        stale = await scheduler_output(session, target)
        sampler = asyncio.create_task(_sample(session, target, stale))
        try:
            await barrier.wait()
            release = time.perf_counter()
            traces = await asyncio.gather(*clients)
        finally:
            sampler.cancel()
            for task in clients:
                task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampler
        return Load(release, traces, sampler_values(sampler, traces, release), flushed)


_Samples = list[tuple[float, float]]  # (moment, tokens/s)


async def _sample(session: aiohttp.ClientSession, target: Target, stale: float | None) -> _Samples:
    """Every new value of the server's own throughput figure, until cancelled."""
    values: _Samples = []
    previous = stale
    with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError):
        while stale is not None:
            await asyncio.sleep(SAMPLE_S)
            value = await scheduler_output(session, target)
            if value is not None and value != previous:
                values.append((time.perf_counter(), value))
                previous = value
    return values


def sampler_values(
    sampler: "asyncio.Task[_Samples]", traces: Sequence[Trace], release: float
) -> list[float]:
    """Values whose window lies in the run.

    The first new value averages over the idle time before the run as well, so it is dropped.
    """
    values = sampler.result() if sampler.done() and not sampler.cancelled() else []
    end = max(trace.end for trace in traces)
    return [value for moment, value in values if release <= moment <= end][1:]


async def scheduler_output(session: aiohttp.ClientSession, target: Target) -> float | None:
    """SGLang's `last_gen_throughput` summed over its schedulers; None for other servers."""
    if target.api != "sglang":
        return None
    info = await server_info(session, target)
    values = [s.get("last_gen_throughput") for s in info.get("internal_states", [])]
    known = [value for value in values if value is not None]
    return sum(known) if known else None


async def server_info(session: aiohttp.ClientSession, target: Target) -> dict[str, Any]:
    """`/server_info`, or {} from a server that has none."""
    with contextlib.suppress(aiohttp.ClientError, ValueError):
        async with session.get(target.url + "/server_info") as response:
            if response.status == 200:
                return await response.json(content_type=None)
    return {}


async def flush_cache(target: Target) -> bool:
    """Forget cached prefixes, so that every run prefills. False where that is not offered."""
    if target.api != "sglang":
        return False
    with contextlib.suppress(aiohttp.ClientError):
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{target.url}/flush_cache?timeout={IDLE_S}") as response,
        ):
            return response.status == 200
    return False
