"""Requests by which a server measures its steps before it answers anybody.

Only where the verify schedule lacks a table of what a step costs (`--dspark-verify scheduled`
without `--dspark-step-cost`). The worker chooses what the steps run and takes their time
(`dspark.speculation.step_timer`); here batches of several sizes are asked for, until everything
was measured a few times or the time is over.
"""

import asyncio
import logging
import os
import random
from time import monotonic
from typing import Any

from dspark.host import warm_up
from dspark.speculation import step_timer
from dspark.speculation.step_cost import Source

logger = logging.getLogger(__name__)

NAME = "dspark-steps"
KEY = "dspark_measure_steps"  # of SGLang's SetInternalStateReq; not for requests from outside
SECONDS = {"cpu": 8.0, "cuda": 20.0}
SIZES = (1, 8, 4, 16, 32)  # requests of a batch; the first are measured where time is short
PASSES = 3
PROMPT_TOKENS = 24
TO_GATHER = 8  # tokens that a request may be ahead of those that arrive after it


def sizes(most: int) -> list[int]:
    """Batches to measure where up to `most` requests run at once."""
    found = [n for n in SIZES if n <= most]
    return found if most in found or most > max(SIZES) else [*found, most]


async def run(disaggregation_mode: str, manager) -> None:
    """SGLang's signature of a warm-up."""
    from sglang.srt.managers.io_struct import SetInternalStateReq

    section = (await manager.get_internal_state())[0].get("dspark", {})
    if section.get("step_cost") != Source.WANTED.value:
        return

    async def tell(begin: bool) -> None:
        # Past `TokenizerManager.set_internal_state`, which refuses this to everybody else.
        request = SetInternalStateReq(server_args={KEY: int(begin)})
        await manager.set_internal_state_communicator(request)

    await tell(begin=True)
    try:
        await ask_for_batches(manager, step_timer.steps_of(section["depth"]) + TO_GATHER)
    finally:
        await tell(begin=False)
    await manager.flush_cache(timeout_s=warm_up.IDLE_S)
    await manager.set_internal_state(SetInternalStateReq(server_args=warm_up.FORGET))


async def ask_for_batches(manager, tokens: int) -> None:
    """Batches of every size in turn, of so many tokens a request."""
    args = manager.server_args
    end = monotonic() + SECONDS["cpu" if args.device == "cpu" else "cuda"]
    draw = random.Random(0)
    for _ in range(PASSES):
        for size in sizes(args.max_running_requests):
            group = warm_up.Group((PROMPT_TOKENS,) * size, warm_up.SAMPLING[0], tokens)
            bodies = list(warm_up.bodies(group, manager.model_config.vocab_size, draw))
            if not await finished(manager, bodies, end - monotonic()):
                return


async def finished(manager, bodies: list[dict[str, Any]], seconds: float) -> bool:
    """Run these requests together; whether all were answered in this time. The rest is aborted."""
    if seconds <= 0:
        return False
    tasks = [asyncio.ensure_future(answered(manager, body)) for body in bodies]
    _, late = await asyncio.wait(tasks, timeout=seconds)
    if late:
        manager.abort_request(abort_all=True)
        await asyncio.wait(late, timeout=warm_up.IDLE_S)
    return not late and all(task.result() for task in tasks)


async def answered(manager, body: dict[str, Any]) -> bool:
    from sglang.srt.managers.io_struct import GenerateReqInput

    try:
        async for _ in manager.generate_request(GenerateReqInput(**body), None):
            pass
    except Exception as error:  # a server that cannot answer this one may answer others
        logger.warning("A request that measures steps failed: %s", error)
        return False
    return True


def ask_for(server_args) -> None:
    """Have SGLang run it, behind all other warm-ups, where a schedule might need it."""
    static = os.environ.get("DSPARK_VERIFY", "static") == "static"
    if static or server_args.speculative_algorithm != "DSPARK":
        return
    from sglang.srt.entrypoints.warmup import warmup

    warmup(NAME)(run)
    named = server_args.warmups.split(",") if server_args.warmups else []
    server_args.warmups = ",".join([*(name for name in named if name != NAME), NAME])
