"""The detokenizer's process: SGLang loads no plugin there, so what it needs of us is set here.

Before a character whose bytes are not complete (U+FFFD at the end of the text), SGLang sends the
text up to the last space or Chinese character, by a rule that forgets what it has sent: it sends
the two characters of a greeting, counts none of them once a comma has followed, and then sends the
greeting again.
"""

from collections.abc import Callable
from typing import Any

from dspark.host import start_log
from dspark.host.stream_interval import UNFINISHED


def run(original: Callable[[Any, Any], None], server_args: Any, port_args: Any) -> None:
    """Entry point of the process, for a server of DeepSeek-V4, in place of `original`."""
    from sglang.srt.managers import detokenizer_manager

    detokenizer_manager.find_printable_text = settled
    start_log.leave_out_what_is_untrue(lambda: True)
    original(server_args, port_args)


def settled(text: str) -> str:
    """What no later token changes: all but a last character whose bytes are not complete.

    Bytes that never become a character are one U+FFFD each, and only the last may still change.
    """
    return text.removesuffix(UNFINISHED)
