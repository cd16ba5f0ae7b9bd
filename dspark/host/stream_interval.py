"""When a streamed answer sends its next event.

SGLang sends where the number of tokens leaves a remainder of 1 by the interval. A step that accepts
several tokens jumps over such numbers, and a client may get nothing before the end.
"""

from collections.abc import Iterable
from typing import Any

UNFINISHED = "\ufffd"  # how the bytes of a character that is not complete are decoded


def is_due(sent: int, written: int, interval: int) -> bool:
    """The first token goes at once; from then on every event brings `interval` tokens or more."""
    return written - sent >= (interval if sent else 1)


def accept(original: Any, accumulator: Any, req: Any) -> None:
    """In place of SGLang's choice for a request that streams and has not ended."""
    parameters = req.sampling_params
    wanted = parameters.stream_interval
    interval = wanted or accumulator.default_stream_interval
    if not is_due(req.send_token_offset, len(req.output_ids), interval):
        return
    parameters.stream_interval = 1  # due at any number of tokens
    try:
        original(accumulator, req=req)
    finally:
        parameters.stream_interval = wanted


def may_become_stop(tail: str, stops: Iterable[str]) -> bool:
    """Whether `tail` ends in the start of a stop string and a character that is not complete.

    SGLang compares the end as it is decoded so far, and sends the start once such bytes follow.
    """
    text = tail.rstrip(UNFINISHED)
    return text != tail and any(
        text.endswith(stop[:size]) for stop in stops for size in range(1, len(stop))
    )
