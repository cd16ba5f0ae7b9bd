"""Events of a streamed answer: none too early, and none missed by a step of several tokens."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.host import stream_interval


def request(interval: int | None) -> SimpleNamespace:
    parameters = SimpleNamespace(stream_interval=interval)
    return SimpleNamespace(
        output_ids=[], send_token_offset=0, holding=False, sampling_params=parameters
    )


def send_at_any_number(sent: list[int], req) -> None:
    """SGLang's own choice at an interval of 1: all that is new, unless it may become a stop."""
    assert req.sampling_params.stream_interval == 1
    if not req.holding:
        sent.append(len(req.output_ids) - req.send_token_offset)
        req.send_token_offset = len(req.output_ids)


def events(steps: list[int], interval: int | None, default: int, held=()) -> list[int]:
    """Tokens of each event; the text of the steps `held` ends in the start of a stop string."""
    req, sent = request(interval), []
    accumulator = SimpleNamespace(default_stream_interval=default)
    for step, tokens in enumerate(steps):
        req.output_ids += [7] * tokens
        req.holding = step in held
        stream_interval.accept(lambda _, req: send_at_any_number(sent, req), accumulator, req)
        assert req.sampling_params.stream_interval == interval
    return sent


def test_one_token_a_step_is_sent_as_sglang_does():
    assert events([1] * 8, 3, 1) == [1, 3, 3]
    assert events([1] * 4, None, 1) == [1, 1, 1, 1]


def test_a_step_of_several_tokens_misses_no_event():
    assert events([1, 5, 5, 5], None, 4) == [1, 5, 5, 5]
    assert events([1, 2, 2, 2, 2], 3, 1) == [1, 4, 4]


def test_what_may_become_a_stop_string_is_held_for_a_step_only():
    assert events([1, 2, 2, 2], 2, 1, held=(1,)) == [1, 4, 2]
    assert events([1, 2], 5, 1, held=(0,)) == [3]


def test_no_event_without_tokens():
    assert events([0, 1, 0, 1], 1, 1) == [1, 1]


@given(st.lists(st.integers(0, 6), max_size=30), st.integers(1, 9))
def test_every_event_brings_the_interval_and_little_more(steps, interval):
    sent = events(steps, interval, 1)
    assert all(interval <= tokens < interval + 6 for tokens in sent[1:])
    assert sum(steps) - sum(sent) < interval


@pytest.mark.parametrize(
    ("tail", "held"),
    [
        ("在苏\ufffd", True),  # the bytes may become the second character
        ("在苏\ufffd\ufffd", True),
        ("在\ufffd", False),
        ("在苏", False),  # SGLang's own comparison sees this
        ("\ufffd", False),
    ],
)
def test_the_start_of_a_stop_is_held_before_half_a_character(tail, held):
    assert stream_interval.may_become_stop(tail, ["x", "苏州"]) == held
