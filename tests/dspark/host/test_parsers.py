"""SGLang's parser objects, as its endpoints use them, with our readers in their places."""

import asyncio
from types import SimpleNamespace

import pytest
from answers import ANSWERS, KNOWN, LONGEST_PIECE, pieces_of
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser

from dspark.host import parsers
from dspark.host.arguments import REASONING_PARSER, TOOL_CALL_PARSER
from dspark.host.markup import Call

TOOLS = [Tool(type="function", function=Function(name=name, parameters={})) for name in KNOWN]


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """Our parsers under SGLang's names, until the test ends."""
    monkeypatch.setattr(ReasoningParser, "DetectorMap", dict(ReasoningParser.DetectorMap))
    entries = dict(FunctionCallParser.ToolCallParserEnum)
    monkeypatch.setattr(FunctionCallParser, "ToolCallParserEnum", entries)
    parsers.install()


def streamed_reasoning(pieces, inside, **options) -> tuple[str, str]:
    parser = ReasoningParser(REASONING_PARSER, force_reasoning=inside, **options)
    found = [parser.parse_stream_chunk(piece) for piece in pieces] + [parser.parse_stream_end()]
    return "".join(reasoning for reasoning, _ in found), "".join(text for _, text in found)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("inside", [False, True])
def test_streamed_reasoning_is_that_of_the_whole_answer(answer, inside):
    whole = ReasoningParser(REASONING_PARSER, force_reasoning=inside).parse_non_stream(answer)
    for size in range(1, LONGEST_PIECE + 1):
        assert streamed_reasoning(pieces_of(answer, size), inside) == whole, size


def test_reasoning_that_is_not_streamed_comes_at_once():
    parser = ReasoningParser(REASONING_PARSER, stream_reasoning=False, force_reasoning=True)
    found = [parser.parse_stream_chunk(piece) for piece in ("abc", "def</thi", "nk>g", "h")]
    assert found == [("", ""), ("", ""), ("abcdef", "g"), ("", "h")]


def test_reasoning_that_never_ends_is_flushed():
    assert streamed_reasoning(["abc", "d </"], True, stream_reasoning=False) == ("abcd </", "")


def streamed_calls(pieces) -> tuple[str, list[Call]]:
    parser = FunctionCallParser(TOOLS, TOOL_CALL_PARSER)
    found = [parser.parse_stream_chunk(piece) for piece in pieces]
    parser.detector.ended = True
    found.append(parser.parse_stream_chunk(""))
    items = [Call(c.tool_index, c.name, c.parameters) for _, calls in found for c in calls]
    return "".join(text for text, _ in found), parsers.whole(items)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_streamed_calls_are_those_of_the_whole_answer(answer):
    text, items = FunctionCallParser(TOOLS, TOOL_CALL_PARSER).parse_non_stream(answer)
    whole = text, [Call(c.tool_index, c.name, c.parameters) for c in items]
    for size in range(1, LONGEST_PIECE + 1):
        assert streamed_calls(pieces_of(answer, size)) == whole, size


def test_unknown_functions_are_handed_on_where_the_operator_says_so(monkeypatch):
    answer = ANSWERS["unknown function"]
    assert [c.name for c in streamed_calls([answer])[1]] == ["weather"]
    monkeypatch.setenv("SGLANG_FORWARD_UNKNOWN_TOOLS", "1")
    assert [c.name for c in streamed_calls([answer])[1]] == ["rm", "weather"]


def as_responses_streams(events: list[str], tools) -> tuple[str, str, list[Call]]:
    """Reasoning, text and calls of an answer whose text so far is in each event.

    Like /v1/responses: the tool call parser is asked only where the other left it some text, and
    nobody says that the answer has ended.
    """

    async def results():
        for number, text in enumerate(events, start=1):
            finish = "stop" if number == len(events) else None
            output = {"text": text, "meta_info": {"finish_reason": finish}}
            yield SimpleNamespace(last_output=output)

    async def read():
        thoughts = ReasoningParser(REASONING_PARSER, force_reasoning=False)
        parser = FunctionCallParser(tools, TOOL_CALL_PARSER)
        offset, reasoning, said, items = 0, "", "", []
        async for context in parsers.marking_the_last(results(), False):
            text = context.last_output["text"]
            thought, piece = thoughts.parse_stream_chunk(text[offset:])
            offset = len(text)
            reasoning += thought
            if piece:
                spoken, calls = parser.parse_stream_chunk(piece)
                said += spoken
                items += [Call(c.tool_index, c.name, c.parameters) for c in calls]
        return reasoning, said, parsers.whole(items)

    return asyncio.run(read())


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_responses_stream_what_the_whole_answer_says(answer):
    thoughts = ReasoningParser(REASONING_PARSER, force_reasoning=False)
    reasoning, text = thoughts.parse_non_stream(answer)
    said, items = FunctionCallParser(TOOLS, TOOL_CALL_PARSER).parse_non_stream(text)
    whole = (reasoning, said, [Call(c.tool_index, c.name, c.parameters) for c in items])
    for size in range(1, LONGEST_PIECE + 1):
        so_far = [answer[:end] for end in range(size, len(answer) + size, size)]
        assert as_responses_streams(so_far, TOOLS) == whole, size
        assert as_responses_streams([*so_far, answer], TOOLS) == whole, "the last brings nothing"
