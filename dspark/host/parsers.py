"""SGLang's reasoning and tool call parsers for DeepSeek-V4, reading with `dspark.host.markup`.

SGLang's own look at one piece at a time: they miss a marker that is split over two pieces or shares
one with other text, and an accepted run of drafts makes such pieces common. Ours take their places
under the same names, in a server of this model only.
"""

import contextvars
from collections.abc import AsyncIterator, Iterable
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.function_call.core_types import StreamingParseResult as ToolResult
from sglang.srt.function_call.core_types import ToolCallItem
from sglang.srt.function_call.deepseekv4_detector import DeepSeekV4Detector as ToolDetector
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import DeepSeekV4Detector as ReasoningDetector
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.parser.reasoning_parser import StreamingParseResult as ReasoningResult

from dspark.host.arguments import REASONING_PARSER, TOOL_CALL_PARSER
from dspark.host.markup import END_THINK, Call, ReasoningReader, ToolCallReader, merged

# Whether the piece that is read is the last of its answer, where nobody calls `finish`.
last_piece = contextvars.ContextVar("last_piece", default=False)


def install() -> None:
    """Put both parsers in the place of SGLang's; calling it again changes nothing."""
    ReasoningParser.DetectorMap[REASONING_PARSER] = SplitReasoning
    FunctionCallParser.ToolCallParserEnum[TOOL_CALL_PARSER] = SplitToolCalls


class SplitReasoning(ReasoningDetector):
    def __init__(self, **options):
        super().__init__(**options)
        self.reader = self._new_reader()
        self.unsent = ""  # reasoning, where it is to come in one piece

    def _new_reader(self) -> ReasoningReader:
        return ReasoningReader(self._in_reasoning, over=END_THINK in self.previous_content)

    def _detect_and_parse_impl(self, text: str) -> ReasoningResult:
        reader = self._new_reader()
        start, end = reader.read(text), reader.finish()
        return ReasoningResult(start.text + end.text, start.reasoning + end.reasoning)

    def _parse_streaming_increment_impl(self, new_text: str) -> ReasoningResult:
        thought = self.reader.read(new_text)
        self._in_reasoning = self.reader.inside
        self.unsent += thought.reasoning
        if last_piece.get():
            end = self.finish()
            return ReasoningResult(thought.text + end.normal_text, end.reasoning_text)
        if self._in_reasoning and not self.stream_reasoning:
            return ReasoningResult(thought.text)
        reasoning, self.unsent = self.unsent, ""
        return ReasoningResult(thought.text, reasoning)

    def finish(self) -> ReasoningResult:
        thought = self.reader.finish()
        reasoning, self.unsent = self.unsent + thought.reasoning, ""
        if self._in_reasoning and self._force_nonempty_content:
            return ReasoningResult(self._accumulated_reasoning + reasoning)
        return ReasoningResult(thought.text, reasoning)


class SplitToolCalls(ToolDetector):
    def __init__(self):
        super().__init__()
        self.reader: ToolCallReader | None = None
        self.ended = False

    def detect_and_parse(self, text: str, tools) -> ToolResult:
        reader = new_reader(tools)
        start, end = reader.read(text), reader.finish()
        return result(start.text + end.text, whole(start.calls + end.calls))

    def parse_streaming_increment(self, new_text: str, tools) -> ToolResult:
        self.reader = self.reader or new_reader(tools)
        text, calls = self.reader.read(new_text)
        if self.ended or last_piece.get():
            end = self.reader.finish()
            text, calls = text + end.text, calls + end.calls
        return result(text, merged(calls))


def new_reader(tools) -> ToolCallReader:
    names = {tool.function.name for tool in tools}
    return ToolCallReader(lambda name: name in names or envs.SGLANG_FORWARD_UNKNOWN_TOOLS.get())


def whole(calls: Iterable[Call]) -> list[Call]:
    """Each call in one piece: its name with all its arguments."""
    names: dict[int, Call] = {}
    for call in merged(calls):
        if call.name is not None:
            names[call.number] = call
        else:
            named = names[call.number]
            names[call.number] = named._replace(arguments=named.arguments + call.arguments)
    return list(names.values())


def result(text: str, calls: Iterable[Call]) -> ToolResult:
    items = [
        ToolCallItem(tool_index=call.number, name=call.name, parameters=call.arguments)
        for call in calls
    ]
    return ToolResult(normal_text=text, calls=items)


async def finish_tool_calls(
    original,
    serving,
    index,
    delta,
    parser_dict,
    content,
    request,
    has_tool_calls,
    continuous_usage_stats=False,
):
    """OpenAIServingChat._process_tool_call_stream never says that the answer has ended."""
    fixed = (parser_dict, content, request, has_tool_calls, continuous_usage_stats)
    async for chunk in original(serving, index, delta, *fixed):
        yield chunk
    detector = getattr(parser_dict[index], "detector", None)
    if content["meta_info"]["finish_reason"] and isinstance(detector, SplitToolCalls):
        detector.ended = True
        async for chunk in original(serving, index, "", *fixed):
            yield chunk


def finish_reasoning(
    original, serving, index, delta, reasoning_parser_dict, content, request, finish_reason_type
):
    """OpenAIServingChat._process_reasoning_stream forgets what is held back when aborted."""
    fixed = (reasoning_parser_dict, content, request)
    reasoning, text = original(serving, index, delta, *fixed, finish_reason_type)
    parser = reasoning_parser_dict[index]
    if finish_reason_type == "abort" and isinstance(parser.detector, SplitReasoning):
        end = parser.detector.finish()
        return reasoning + end.reasoning_text, text + end.normal_text
    return reasoning, text


async def marking_the_last(results: AsyncIterator[Any], incremental: bool) -> AsyncIterator[Any]:
    """What /v1/responses streams an answer from, which never says to a parser that it has ended.

    A parser is not even asked where the last result brings no text. Hence the last character of
    every other result waits for the next one.

    Args:
        results: contexts; `last_output` has the text so far, or its new piece if `incremental`.
    """
    last_piece.set(False)
    async for context in results:
        output = context.last_output
        if output["meta_info"]["finish_reason"]:
            last_piece.set(True)
        elif not incremental:
            context.last_output = output | {"text": output["text"][:-1]}
        yield context
    last_piece.set(False)
