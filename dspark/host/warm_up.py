"""Requests that a server answers before it is ready, so that nobody waits for a compiler.

Triton compiles a kernel once for every class of arguments: a count that is 1, a multiple of 16 or
neither, and the launch table's ranges of rows. Decode steps compile when their graphs are
captured; prompts do here, through the same door as any request. SGLang runs warm-ups by name.
"""

import asyncio
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from tqdm import tqdm

logger = logging.getLogger(__name__)

NAME = "dspark"
NEW_TOKENS = 3
BATCH_TOKENS = 12  # so that requests that arrive one after another still run together
IDLE_S = 30.0  # most that the last step may take to end
# Both sides of every range of rows, at a multiple of 16 and beside it.
PROMPT_ROWS = (1, 2, 10, 11, 16, 17, 64, 65, 80, 85, 86, 96, 112, 341, 342, 352, 512, 513)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.3},
)
FORGET = {"dspark_clear_info_records": 1}
BATCHES = (2, 3, 16)  # requests at once


class Group(NamedTuple):
    """Requests that are sent together."""

    lengths: tuple[int, ...]  # tokens of each prompt
    sampling: dict[str, Any]
    new_tokens: int = NEW_TOKENS


def groups(chunk: int, longest: int, requests: int) -> list[Group]:
    """What to run: every class of prompt alone, then every way to sample, in batches too.

    chunk: most rows of a prompt batch, 0 if prompts are not divided. longest: tokens of the
    longest prompt that can be answered.
    """
    widest = {chunk - 1, chunk, chunk + 1, 2 * chunk + 17} if chunk else {longest}
    rows = sorted({*PROMPT_ROWS, *widest})
    alone = [Group((n,), SAMPLING[0]) for n in rows if 1 <= n <= longest]
    batches = sorted({min(n, requests) for n in (1, *BATCHES, requests)})
    length, new_tokens = max(1, min(24, longest - BATCH_TOKENS)), min(BATCH_TOKENS, longest)
    return alone + [Group((length,) * n, how, new_tokens) for how in SAMPLING for n in batches]


def bodies(group: Group, vocab: int, random_tokens: random.Random) -> Iterator[dict[str, Any]]:
    """Keyword arguments of SGLang's GenerateReqInput; no two prompts share a prefix."""
    for length in group.lengths:
        yield {
            "input_ids": [random_tokens.randrange(vocab) for _ in range(length)],
            "sampling_params": group.sampling
            | {"max_new_tokens": group.new_tokens, "ignore_eos": True},
        }


async def run(disaggregation_mode: str, tokenizer_manager) -> None:
    """SGLang's signature of a warm-up; awaited before the server answers anybody."""
    from sglang.srt.managers.io_struct import GenerateReqInput, SetInternalStateReq

    args, vocab = tokenizer_manager.server_args, tokenizer_manager.model_config.vocab_size
    before, started = compiled_kernels(), time.monotonic()
    random_tokens = random.Random(0)

    async def ask(body: dict[str, Any]) -> None:
        try:
            async for _ in tokenizer_manager.generate_request(GenerateReqInput(**body), None):
                pass
        except Exception as error:  # a server that cannot answer this one may answer others
            logger.warning(
                "A warm-up request of %d tokens failed: %s", len(body["input_ids"]), error
            )

    context = tokenizer_manager.model_config.context_len
    # Both lengths are refused themselves; only what is shorter is served.
    longest = min(context - NEW_TOKENS, tokenizer_manager.max_req_input_len) - 1
    planned = groups(max(args.chunked_prefill_size, 0), longest, args.max_running_requests)
    for group in tqdm(planned, desc="Compiling the kernels of prompts", unit="batch"):
        await asyncio.gather(*(ask(body) for body in bodies(group, vocab, random_tokens)))
    await tokenizer_manager.flush_cache(timeout_s=IDLE_S)
    if args.speculative_algorithm is not None:
        # Random tokens say nothing of how many drafts are accepted.
        await tokenizer_manager.set_internal_state(SetInternalStateReq(server_args=FORGET))
    logger.info(
        "Ready %.1f s after the start, %.1f s of them warm-up; it compiled %d kernels.",
        time.time() - psutil.Process().create_time(),
        time.monotonic() - started,
        len(compiled_kernels() - before),
    )


def compiled_kernels() -> set[str]:
    """Kernels in Triton's cache on disk as "hash/name", by which cold and warm starts differ."""
    from triton import knobs

    return {f"{file.parent.name}/{file.stem}" for file in Path(knobs.cache.dir).glob("*/*.cubin")}


def register() -> None:
    """Put the warm-up where SGLang looks for it."""
    from sglang.srt.entrypoints.warmup import warmup

    warmup(NAME)(run)


def ask_for(server_args) -> None:
    """Have SGLang run it, besides any that the user named."""
    named = server_args.warmups.split(",") if server_args.warmups else []
    if NAME not in named:
        server_args.warmups = ",".join([NAME, *named])
