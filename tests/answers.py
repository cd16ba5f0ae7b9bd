"""Answers with reasoning and tool calls, whole and cut off, and how they are cut into pieces."""

from dspark.host.markup import (
    CALLS,
    END_CALLS,
    END_INVOKE,
    END_PARAMETER,
    END_THINK,
    INVOKE,
    PARAMETER,
    THINK,
)

LONGEST_PIECE = 12
KNOWN = ("weather", "write_file")


def call(name: str, *parameters: str) -> str:
    return f'{INVOKE} name="{name}">\n' + "".join(f"{p}\n" for p in parameters) + END_INVOKE


def parameter(name: str, value: str, string: bool = True) -> str:
    flag = "true" if string else "false"
    return f'{PARAMETER} name="{name}" string="{flag}">{value}{END_PARAMETER}'


def calls(*each: str) -> str:
    return f"\n\n{CALLS}\n" + "\n".join(each) + f"\n{END_CALLS}"


SUZHOU = call("weather", parameter("city", "苏州 🌧️"), parameter("days", "3", string=False))
SCRIPT = call("write_file", parameter("text", '  if a < b:\n\treturn "</div>" \n'))
ANSWERS = {
    "text": "1 < 2, and </b> is a tag.\n\nDone.\n\n",
    "ends in a marker's start": "so a <",
    "reasoning": f"Let me see… 好的。{END_THINK}The answer is 42. 🎉",
    "second end": f"a{END_THINK}b{END_THINK}c{THINK}d",
    "start and end": f"{THINK}abc def{END_THINK}normal text",
    "late start": f"abc{THINK}def{END_THINK}ghi",
    "almost an end": f"x<</think </thin{END_THINK}<y",
    "one call": "I look it up." + calls(SUZHOU),
    "two calls": calls(SUZHOU, SCRIPT),
    "calls behind reasoning": f"你好{END_THINK}\n" + calls(SCRIPT, SUZHOU) + "\n\nand more",
    "no parameters": calls(call("weather"), f'{INVOKE} name="weather"/>'),
    "JSON": calls(call("weather", '{"city": "苏州", "n": [1, 2]} ')),
    "no JSON": calls(call("weather", parameter("days", "a few", string=False))),
    "unknown function": "x" + calls(call("rm", parameter("path", "/")), SUZHOU),
    "bare call": "text\n\n" + SUZHOU + " more",
    "nothing called": "a" + calls(),
    "cut off in a string": "a" + calls(SUZHOU).partition("州")[0],
    "cut off in a marker": "a\n\n" + CALLS[:9],
}


def pieces_of(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]
