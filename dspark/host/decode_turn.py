"""A decode step after every chunk of a long prompt, so that running requests keep streaming.

SGLang prefers prefill: all chunks of a long prompt run in a row while everyone else waits. Its
remedy, batches that mix a chunk with decode rows, is switched off under speculative decoding.
"""

from typing import Any


def is_due(scheduler: Any, running_batch: Any) -> bool:
    """Whether the running requests decode now, before the next chunk of `scheduler.chunked_req`.

    Not where a decode step would have to retract a request to find memory: the chunks run on,
    as they would without us.
    """
    last = scheduler.last_batch
    if scheduler.chunked_req is None or last is None or not last.forward_mode.is_extend():
        return False
    # Finished requests are still in the batch, but their pages are gone.
    running = [i for i, req in enumerate(running_batch.reqs) if not req.finished()]
    return (
        len(running) > 0
        and not running_batch.is_prefill_only
        and running_batch.check_decode_mem(selected_indices=running)
    )
