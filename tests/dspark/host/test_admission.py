"""The longest prompt is what SGLang's own admission would start on an idle server."""

import re
from types import SimpleNamespace

import pytest
from sglang.srt.managers import utils

from dspark.host import admission
from dspark.host.admission import Room, find_length_fault, limit_prompts, longest_prompt

PAGE = 256
LONG = 10**6  # a context that bounds nothing


def is_started(prompt: int, room: Room) -> bool:
    """SGLang's conditions for one new token, with all pages free."""
    pages = -(-prompt // PAGE)
    new = min(1, room.total - pages * PAGE - PAGE - 1)  # what it cuts the number of new tokens to
    fits_window = room.chunked or pages * PAGE + PAGE < room.window
    return new == 1 and prompt + new + PAGE < room.total and fits_window


@pytest.mark.parametrize("total", range(2 * PAGE, 12 * PAGE + 1, PAGE))
@pytest.mark.parametrize("window", [4 * PAGE, 5 * PAGE, 12 * PAGE])
@pytest.mark.parametrize("chunked", [True, False])
def test_the_bound_is_where_admission_ends(total, window, chunked):
    room = Room(total, window, LONG, chunked)
    assert longest_prompt(room).tokens == max(
        (n for n in range(1, total + 1) if is_started(n, room)), default=0
    )


INFO = (4096, "b", "c", "d", 900, 895, "rest")


def test_the_shortest_prompt_to_refuse():
    """A bound of the context is SGLang's own, 6 below it."""
    assert limit_prompts(INFO, Room(4096, 4096, 901, True)) == INFO
    assert limit_prompts(INFO, Room(1024, 1024, 4096, True))[5] == 513
    assert limit_prompts(INFO, Room(4096, 1024, 4096, True))[5] == 3841 - PAGE
    assert limit_prompts(INFO, Room(4096, 1024, 4096, False))[5] == 513


@pytest.mark.parametrize(
    ("room", "longest", "said"),
    [
        (Room(1024, 1024, 4096, True), 512, "pool holds 1024 tokens.*--max-total-tokens"),
        (Room(4096, 1024, 4096, False), 512, "window pool holds 1024.*--chunked-prefill-size"),
        (Room(9999, 9999, 900, True), 893, "context has 900 tokens.*--context-length"),
    ],
    ids=["pool", "window", "context"],
)
def test_the_sentence_names_what_bounds_a_prompt(room, longest, said):
    """Failed before: 513 tokens were said to exceed 513."""
    assert find_length_fault(longest, room) is None
    fault = find_length_fault(longest + 1, room)
    assert re.search(f"^The prompt has {longest + 1} tokens, and at most {longest} .*{said}", fault)
    assert len(fault.splitlines()) == 1


@pytest.mark.parametrize("length", [512, 513, 1000])
def test_a_prompt_is_cut_to_one_that_can_start(monkeypatch, length):
    """Failed before: it was cut to the shortest that can not, which waited for ever."""
    monkeypatch.setattr(admission, "_room", Room(1024, 1024, 4096, True))
    request = SimpleNamespace(origin_input_ids=list(range(length)))
    original = utils.validate_input_length
    assert admission.check_length(original, request, 513, True) is None
    assert request.origin_input_ids == list(range(512))


def test_other_models_keep_sglangs_own_check(monkeypatch):
    monkeypatch.setattr(admission, "_room", None)
    request = SimpleNamespace(origin_input_ids=[1] * 10)
    fault = admission.check_length(utils.validate_input_length, request, 10, False)
    assert "(10 tokens)" in fault
