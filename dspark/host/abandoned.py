"""Streams that a client leaves: their requests end, and no other of the same name."""

import asyncio
from typing import Any

from starlette.background import BackgroundTasks

WAIT_S = 2  # as long as SGLang waits


def abort_task(manager: Any, request: Any) -> BackgroundTasks:
    """What runs behind a streamed response.

    SGLang aborts by name, also where the stream ended as it should: a request that took the name
    over within the two seconds would be aborted instead.

    Args:
        manager: SGLang's TokenizerManager.
        request: the GenerateReqInput that is streamed.
    """
    tasks = BackgroundTasks()
    tasks.add_task(abort_own, manager, request)
    return tasks


async def abort_own(manager: Any, request: Any) -> None:
    """Abort what `request` may have left behind, but nothing that another one asked for."""
    await asyncio.sleep(WAIT_S)
    prompts = [request] if request.is_single else [request[i] for i in range(len(request.rid))]
    for prompt in prompts:
        state = manager.rid_to_state.get(prompt.rid)
        if state is None or state.obj is prompt:  # without a state there may still be choices
            manager.abort_request(prompt.rid)
