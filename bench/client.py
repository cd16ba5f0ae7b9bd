"""One streamed completion, timed as a client sees it. Speaks SGLang's and OpenAI's protocol.

Tokens are counted from the server's usage figures. Counting stream chunks would be wrong: with
speculation, and whenever the server coalesces, one chunk carries several tokens.
"""

import json
import time
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, NamedTuple

import aiohttp

APIS = ("sglang", "openai")
PATHS = {"sglang": "/generate", "openai": "/v1/completions"}


class RequestFailed(RuntimeError):
    """The server answered with an error, or without the figures that are counted."""


class Step(NamedTuple):
    """The moment at which the client knew of `tokens` tokens in all."""

    at: float  # time.perf_counter() seconds
    tokens: int


class Trace(NamedTuple):
    """One request. Times are `time.perf_counter()` seconds of the client."""

    start: float
    steps: list[Step]  # at least one; tokens ascend
    end: float
    output_ids: list[int] | None  # None when the server does not send ids
    verify_steps: int | None  # None when the server does not say
    accepted: list[int]  # entry k: verify steps that accepted k drafts; empty when unknown

    @property
    def first_token(self) -> float:
        return self.steps[0].at

    @property
    def tokens(self) -> int:
        return self.steps[-1].tokens

    def tokens_at(self, moment: float) -> int:
        """Tokens known at a moment."""
        return max((s.tokens for s in self.steps if s.at <= moment), default=0)


def request_body(
    api: str,
    prompt: list[int],
    new_tokens: int,
    model: str,
    temperature: float = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """A request for exactly `new_tokens` tokens: greedy, or drawn by `seed`."""
    if api == "sglang":
        sampling = {"temperature": temperature, "max_new_tokens": new_tokens, "ignore_eos": True}
        if temperature:
            sampling["sampling_seed"] = seed
        return {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    } | ({"seed": seed} if temperature else {})


class Reading:
    """Collects the events of one stream, whichever protocol they follow."""

    def __init__(self, api: str, start: float):
        self.api = api
        self.start = start
        self.steps: list[Step] = []
        self.ids: list[int] = []
        self.meta: dict[str, Any] = {}
        self.first_text: float | None = None

    def add(self, event: dict[str, Any], at: float) -> None:
        """RequestFailed when the event is an error."""
        if "error" in event:
            error = event["error"]
            raise RequestFailed(error.get("message", error) if isinstance(error, dict) else error)
        if self.api == "sglang":
            self.meta = event["meta_info"]
            tokens = self.meta["completion_tokens"]
            ids = event.get("output_ids") or []
            # Servers send either all ids so far or the new ones only.
            self.ids = ids if len(ids) == tokens else self.ids + ids
        else:
            if event.get("choices") and self.first_text is None:
                self.first_text = at
            tokens = (event.get("usage") or {}).get("completion_tokens", 0)
        if tokens > (self.steps[-1].tokens if self.steps else 0):
            self.steps.append(Step(at, tokens))

    def finish(self, end: float) -> Trace:
        """RequestFailed when no usage was reported."""
        if not self.steps:
            raise RequestFailed("The server reported no usage, so its tokens cannot be counted.")
        steps = self.steps
        if len(steps) == 1 and self.first_text is not None and self.first_text < steps[0].at:
            # Usage came once, at the end: the first chunk still shows when the first token came.
            steps = [Step(self.first_text, 1), steps[0]]
        complete = len(self.ids) == steps[-1].tokens
        return Trace(
            self.start,
            steps,
            end,
            self.ids if complete else None,
            self.meta.get("spec_verify_ct"),
            self.meta.get("spec_correct_drafts_histogram") or [],
        )


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    prompt: list[int],
    new_tokens: int,
    api: str = "sglang",
    model: str = "default",
    temperature: float = 0,
    seed: int = 0,
) -> Trace:
    """Send one request (`request_body`) and time its stream.

    Raises:
        RequestFailed: the server refused, or did not say how many tokens it produced.
    """
    body = request_body(api, prompt, new_tokens, model, temperature, seed)
    reading = Reading(api, time.perf_counter())
    async with session.post(url + PATHS[api], json=body) as response:
        if response.status != 200:
            raise RequestFailed(f"{response.status}: {(await response.text())[:500]}")
        async for event in events(response.content):
            reading.add(event, time.perf_counter())
    return reading.finish(time.perf_counter())


async def events(lines: AsyncIterable[bytes]) -> AsyncIterator[dict[str, Any]]:
    """JSON bodies of a server-sent event stream."""
    async for line in lines:
        data = line.strip().removeprefix(b"data:").strip()
        if data and data != b"[DONE]" and line.startswith(b"data:"):
            yield json.loads(data)
