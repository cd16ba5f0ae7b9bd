"""An answer taken apart into reasoning, text and tool calls, the same way however it is cut.

A server sends an answer in pieces: a token, an accepted run of several, or what came since the last
event. Both readers here hold back exactly what may still become a marker, so that what they give in
all depends on the whole text only; an answer that is not streamed is read by the same code.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"
CALLS, END_CALLS = f"<{DSML}tool_calls>", f"</{DSML}tool_calls>"
INVOKE, END_INVOKE = f"<{DSML}invoke", f"</{DSML}invoke>"
PARAMETER, END_PARAMETER = f"<{DSML}parameter", f"</{DSML}parameter>"
BEFORE_CALLS = "\n\n"  # written between a text and the calls that follow it; part of neither

REST_OF_TAG = re.compile(r'(?:[^">]|"[^"]*")*>')
ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class Found(NamedTuple):
    before: str  # text that is certainly not part of a marker
    marker: str | None  # the first marker behind it, consumed; None if there is none yet
    rest: str  # what is left: behind the marker, or what may still become one


def find(text: str, markers: Iterable[str]) -> Found:
    """Cut `text` at the first of `markers`, or before what may be the beginning of one."""
    places = [(text.find(marker), marker) for marker in markers]
    found = min(((at, marker) for at, marker in places if at >= 0), default=None)
    if found is not None:
        at, marker = found
        return Found(text[:at], marker, text[at + len(marker) :])
    held = max((held_back(text, marker) for marker in markers), default=0)
    return Found(text[: len(text) - held], None, text[len(text) - held :])


def held_back(text: str, marker: str) -> int:
    """Characters at the end of `text` that begin `marker` but do not complete it."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)


class Thought(NamedTuple):
    reasoning: str
    text: str


class ReasoningReader:
    """Splits an answer at `</think>`, and at a `<think>` where it did not start inside.

    Each marker counts once: behind the end of the reasoning both are ordinary text.
    """

    def __init__(self, inside: bool, over: bool = False):
        """inside: the prompt ends within the reasoning; over: it ends behind it."""
        self.inside, self.over = inside and not over, over
        self.opened = False
        self.buffer = ""

    def read(self, piece: str) -> Thought:
        """What is certain after another piece of the answer."""
        self.buffer += piece
        reasoning, text = "", ""
        while self.buffer:
            before, marker, self.buffer = find(self.buffer, self._markers())
            if self.inside:
                reasoning += before
            else:
                text += before
            if marker is None:
                break
            self.inside, self.opened = marker == THINK, True
            self.over = marker == END_THINK
        return Thought(reasoning, text)

    def finish(self) -> Thought:
        """What was held back, once the answer has ended."""
        held, self.buffer = self.buffer, ""
        return Thought(held, "") if self.inside else Thought("", held)

    def _markers(self) -> list[str]:
        if self.over:
            return []
        opening = [] if self.opened else [THINK]
        return [*opening, END_THINK] if self.inside else opening


class Call(NamedTuple):
    """A piece of one tool call: its name comes first, alone, then its arguments in order."""

    number: int  # of the call within the answer, from 0
    name: str | None
    arguments: str  # part of a JSON text


class Pieces(NamedTuple):
    text: str
    calls: list[Call]


class ToolCallReader:
    """Takes tool calls out of an answer; their arguments become JSON while they are written.

    A string parameter is handed on character by character, any other value when it is complete.
    A call of an unknown function is left out.
    """

    def __init__(self, known: Callable[[str], bool]):
        self.known = known
        self.buffer = ""
        self.step: Callable[[], bool] = self._in_text
        self.closing: Callable[[], bool] = self._in_text  # where a call's end leads back to
        self.index = -1
        self.silent = False  # inside a call of an unknown function
        self.empty = True  # no parameter of this call yet
        self.text = ""
        self.calls: list[Call] = []

    def read(self, piece: str) -> Pieces:
        """What is certain after another piece of the answer."""
        self.buffer += piece
        self.text, self.calls = "", []
        while self.step():
            pass
        return Pieces(self.text, merged(self.calls))

    def finish(self) -> Pieces:
        """What was held back, once the answer has ended; an incomplete marker is text."""
        held, self.buffer = self.buffer, ""
        if self.step == self._in_text:
            return Pieces(held, [])
        self.calls = []
        if self.step == self._in_string:
            self._argue(escaped(held))
        elif self.step == self._in_json:
            self._argue(held)
        return Pieces("", self.calls)

    # Each step consumes what it can and says whether the next one may go on.

    def _in_text(self) -> bool:
        markers = (BEFORE_CALLS + CALLS, CALLS, BEFORE_CALLS + INVOKE, INVOKE)
        before, marker, self.buffer = find(self.buffer, markers)
        self.text += before
        if marker is None:
            return False
        bare = marker.endswith(INVOKE)
        self.closing = self._in_text if bare else self._between_calls
        self.step = self._in_call_tag if bare else self._between_calls
        return True

    def _between_calls(self) -> bool:
        _, marker, self.buffer = find(self.buffer, (INVOKE, END_CALLS))
        if marker is not None:
            self.step = self._in_call_tag if marker == INVOKE else self._in_text
        return marker is not None

    def _in_call_tag(self) -> bool:
        tag = self._rest_of_tag()
        if tag is None:
            return False
        name = tag.get("name", "").strip()
        self.silent = not self.known(name)
        self.empty = True
        if not self.silent:
            self.index += 1
            self.calls.append(Call(self.index, name, ""))
        if "/" in tag:
            self._end_call()
        else:
            self.step = self._at_body
        return True

    def _at_body(self) -> bool:
        """Arguments are parameter tags or, seldom, one JSON object."""
        self.buffer = self.buffer.lstrip()
        if not self.buffer:
            return False
        self.step = self._in_json if self.buffer[0] == "{" else self._between_parameters
        return True

    def _in_json(self) -> bool:
        before, marker, self.buffer = find(self.buffer, (END_INVOKE,))
        if marker is None:  # white space at the end is not part of the object
            stripped = before.rstrip()
            self.buffer = before[len(stripped) :] + self.buffer
            before = stripped
        self._argue(before.rstrip())
        if marker is not None:
            self.step = self.closing
        return marker is not None

    def _between_parameters(self) -> bool:
        _, marker, self.buffer = find(self.buffer, (PARAMETER, END_INVOKE))
        if marker == PARAMETER:
            self.step = self._in_parameter_tag
        elif marker == END_INVOKE:
            self._end_call()
        return marker is not None

    def _end_call(self) -> None:
        self._argue("{}" if self.empty else "}")
        self.step = self.closing

    def _in_parameter_tag(self) -> bool:
        tag = self._rest_of_tag()
        if tag is None:
            return False
        self._argue(("{" if self.empty else ", ") + quoted(tag.get("name", "")) + ": ")
        self.empty = False
        if tag.get("string") == "true":
            self._argue('"')
            self.step = self._in_string
        else:
            self.step = self._in_value
        return True

    def _in_string(self) -> bool:
        before, marker, self.buffer = find(self.buffer, (END_PARAMETER,))
        self._argue(escaped(before))
        if marker is not None:
            self._argue('"')
            self.step = self._between_parameters
        return marker is not None

    def _in_value(self) -> bool:
        value, marker, rest = find(self.buffer, (END_PARAMETER,))
        if marker is None:
            return False  # nothing is consumed: a value is read as a whole
        self.buffer = rest
        self._argue(as_json(value))
        self.step = self._between_parameters
        return True

    def _rest_of_tag(self) -> dict[str, str] | None:
        """Attributes of the tag whose name was read, or None before its `>` has come."""
        match = REST_OF_TAG.match(self.buffer)
        if match is None:
            return None
        self.buffer = self.buffer[match.end() :]
        attributes = dict(ATTRIBUTE.findall(match[0]))
        return attributes | {"/": ""} if match[0].endswith("/>") else attributes

    def _argue(self, arguments: str) -> None:
        if arguments and not self.silent:
            self.calls.append(Call(self.index, None, arguments))


def merged(calls: Iterable[Call]) -> list[Call]:
    """Neighbouring pieces of arguments joined; between those of two calls stands a name."""
    joined: list[Call] = []
    for call in calls:
        last = joined[-1] if joined else None
        if last is not None and call.name is None and last.name is None:
            joined[-1] = last._replace(arguments=last.arguments + call.arguments)
        else:
            joined.append(call)
    return joined


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Part of a JSON string; escaping goes character by character, so parts can be joined."""
    return quoted(text)[1:-1]


def as_json(value: str) -> str:
    """A parameter that is said to be JSON; as a string where it is not.

    Grammars of strict tools let a model write a string without quotes here. Blanks around a value
    mean nothing either way.
    """
    value = value.strip()
    try:
        json.loads(value)
    except ValueError:
        return quoted(value)
    return value
