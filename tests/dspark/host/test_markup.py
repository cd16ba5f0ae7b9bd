"""What an answer is taken apart into depends on its text, not on how it was cut into pieces."""

import json

import pytest
from answers import ANSWERS, KNOWN, LONGEST_PIECE, pieces_of
from hypothesis import given
from hypothesis import strategies as st

from dspark.host.markup import (
    CALLS,
    END_CALLS,
    END_INVOKE,
    END_PARAMETER,
    END_THINK,
    INVOKE,
    PARAMETER,
    THINK,
    ReasoningReader,
    ToolCallReader,
)


def reason(pieces, inside: bool) -> tuple[str, str]:
    reader = ReasoningReader(inside)
    thoughts = [reader.read(piece) for piece in pieces] + [reader.finish()]
    return "".join(t.reasoning for t in thoughts), "".join(t.text for t in thoughts)


def take_calls(pieces) -> tuple[str, list[tuple[str, str]]]:
    """The text, and name and arguments of each call, as a client joins the deltas."""
    reader = ToolCallReader(KNOWN.__contains__)
    text, named = "", []
    for text_piece, found in [*map(reader.read, pieces), reader.finish()]:
        text += text_piece
        for index, name, arguments in found:
            if name is not None:
                assert (index, arguments) == (len(named), "")
                named.append((name, ""))
            else:
                assert index == len(named) - 1
                named[-1] = (named[-1][0], named[-1][1] + arguments)
    return text, named


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("inside", [False, True])
def test_every_size_of_pieces_gives_the_same(answer, inside):
    reasoning, content = reason(answer, inside)
    whole = take_calls(content)
    for size in range(1, LONGEST_PIECE + 1):
        assert reason(pieces_of(answer, size), inside) == (reasoning, content), size
        assert take_calls(pieces_of(content, size)) == whole, size


FRAGMENTS = st.sampled_from(
    [
        *(THINK, END_THINK, CALLS, END_CALLS, INVOKE, END_INVOKE, PARAMETER, END_PARAMETER),
        *("<", "/", ">", "\n", "\n\n", "｜", "DSML", ' name="weather">', '"', "\\", "{", "}"),
        *(' name="a" string="true">', ' name="b" string="false">', "12", "é", "好", "🎉", " "),
    ]
)


@given(st.lists(FRAGMENTS | st.text(max_size=3), max_size=24), st.booleans(), st.data())
def test_every_cut_of_any_text_gives_the_same(fragments, inside, data):
    answer = "".join(fragments)
    sizes = data.draw(st.lists(st.integers(1, LONGEST_PIECE), min_size=1, max_size=8))
    pieces, at = [], 0
    while at < len(answer):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(answer[at : at + size])
        at += size
    assert reason(pieces, inside) == reason([answer], inside)
    assert take_calls(pieces) == take_calls([answer])


@given(st.text(alphabet=st.characters(exclude_characters="<"), max_size=60))
def test_text_without_markers_is_left_as_it_is(text):
    assert reason(text, inside=False) == ("", text)
    assert take_calls(text) == (text, [])


def test_reasoning():
    assert reason([ANSWERS["reasoning"]], True) == ("Let me see… 好的。", "The answer is 42. 🎉")
    assert reason([ANSWERS["start and end"]], False) == ("abc def", "normal text")
    assert reason([ANSWERS["second end"]], True) == ("a", f"b{END_THINK}c{THINK}d")
    assert reason([ANSWERS["almost an end"]], True) == ("x<</think </thin", "<y")
    assert reason(["cut off </thi"], True) == ("cut off </thi", "")


def test_a_continued_answer_is_behind_its_reasoning():
    reader = ReasoningReader(inside=True, over=True)
    assert reader.read(f"a{END_THINK}b") == ("", f"a{END_THINK}b")


def test_calls():
    assert take_calls([ANSWERS["one call"]]) == (
        "I look it up.",
        [("weather", '{"city": "苏州 🌧️", "days": 3}')],
    )
    text, found = take_calls([ANSWERS["two calls"]])
    assert (text, [name for name, _ in found]) == ("", ["weather", "write_file"])
    written = json.loads(found[1][1])
    assert written == {"text": '  if a < b:\n\treturn "</div>" \n'}, "white space is part of it"


def test_seldom_forms_of_calls():
    assert take_calls([ANSWERS["no parameters"]]) == ("", [("weather", "{}")] * 2)
    assert take_calls([ANSWERS["JSON"]]) == ("", [("weather", '{"city": "苏州", "n": [1, 2]}')])
    assert take_calls([ANSWERS["no JSON"]]) == ("", [("weather", '{"days": "a few"}')])
    blanks = ANSWERS["no JSON"].replace("a few", "\n 苏州 \n")
    assert take_calls([blanks]) == ("", [("weather", '{"days": "苏州"}')])
    assert take_calls([ANSWERS["bare call"]])[0] == "text more"
    assert take_calls([ANSWERS["nothing called"]]) == ("a", [])
    assert [name for name, _ in take_calls([ANSWERS["unknown function"]])[1]] == ["weather"]
    assert take_calls([ANSWERS["calls behind reasoning"]])[0] == f"你好{END_THINK}\n\n\nand more"


def test_what_is_held_back_comes_at_the_end():
    assert take_calls(["so a <"]) == ("so a <", [])
    assert take_calls([ANSWERS["cut off in a marker"]]) == (ANSWERS["cut off in a marker"], [])
    assert take_calls([ANSWERS["cut off in a string"]]) == ("a", [("weather", '{"city": "苏')])


def test_string_arguments_are_handed_on_while_they_are_written():
    reader = ToolCallReader(KNOWN.__contains__)
    opening = f'{CALLS}\n{INVOKE} name="write_file">\n{PARAMETER} name="text" string="true">'
    assert reader.read(opening).calls == [(0, "write_file", ""), (0, None, '{"text": "')]
    assert reader.read('say "hi"').calls == [(0, None, 'say \\"hi\\"')]
    assert reader.read(" </").calls == [(0, None, " ")]
    assert reader.read("p>").calls == [(0, None, "</p>")]
