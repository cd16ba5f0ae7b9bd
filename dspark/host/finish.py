"""When a request ends inside a run of accepted tokens: as if they had come one by one.

SGLang tests the length limit before stop tokens and stop strings, and tests the whole run at
once. A run that reaches the limit would then end by length although a stop came before it. It
also counts all of the run as reasoning where the request ends inside it.
"""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

BROKEN = -1  # emitted by the worker in place of a token it could not choose


def update_finish_state(original: Callable, req: Any, new_accepted_len: int = 1) -> None:
    """Around `Req.update_finish_state`; `req.output_ids` ends with the new tokens."""
    if req.finished() or req.to_finish:
        original(req, new_accepted_len)
        return
    if BROKEN in req.output_ids[-new_accepted_len:]:
        abort(req, new_accepted_len)
        return
    limit = req.sampling_params.max_new_tokens
    beyond = len(req.output_ids) - limit
    if beyond >= 0 and new_accepted_len > beyond:
        _look_for_stop(original, req, new_accepted_len - beyond, limit)
    if not req.finished():
        original(req, new_accepted_len)
    if req.finished():
        # SGLang has counted the whole run; what lies beyond the end was never sent.
        req.reasoning_tokens = min(req.reasoning_tokens, len(req.output_ids_through_stop))


def abort(req: Any, new_accepted_len: int) -> None:
    """End a request whose logits held no usable number; the others of its batch go on."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    first = len(req.output_ids) - new_accepted_len
    place = req.output_ids.index(BROKEN, first)
    del req.output_ids[place:]
    req.finished_reason = FINISH_ABORT(
        "the model produced no usable logits for this request",
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "InternalServerError",
    )


def _look_for_stop(original: Callable, req: Any, new: int, limit: int) -> None:
    """Test the tokens up to the limit for a stop, with the limit out of the way."""
    beyond = req.output_ids[limit:]
    del req.output_ids[limit:]
    req.sampling_params.max_new_tokens = limit + 1
    try:
        original(req, new)
    finally:
        req.sampling_params.max_new_tokens = limit
        req.output_ids.extend(beyond)
