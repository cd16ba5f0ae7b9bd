"""Streams that a client leaves are aborted; requests that took over their name are not."""

import asyncio
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from dspark.host import abandoned


@pytest.fixture
def aborted(monkeypatch):
    """Function (manager's states, request) -> names aborted behind the request's stream."""
    monkeypatch.setattr(abandoned, "WAIT_S", 0)

    def left(states: dict, request) -> list[str]:
        names: list[str] = []
        manager = SimpleNamespace(rid_to_state=states, abort_request=names.append)
        asyncio.run(abandoned.abort_task(manager, request)())
        return names

    return left


def request(names, prompts) -> GenerateReqInput:
    one = GenerateReqInput(input_ids=prompts, rid=names, stream=True, sampling_params={})
    one.normalize_batch_and_arguments()
    return one


def states(**requests) -> dict:
    return {name: SimpleNamespace(obj=each) for name, each in requests.items()}


def test_a_stream_that_was_left_is_aborted(aborted):
    left = request("a", [5])
    assert aborted(states(a=left), left) == ["a"]


def test_another_request_of_the_same_name_is_not(aborted):
    """Failed before: it ended as aborted, in the middle of its answer."""
    assert aborted(states(a=request("a", [6])), request("a", [5])) == []


def test_each_prompt_of_a_request_has_its_own_name(aborted):
    left = request(["a", "b", "c"], [[5], [6], [7]])
    held = states(a=left[0], b=request("b", [6]), c=left[2])
    assert aborted(held, left) == ["a", "c"]


def test_choices_may_outlive_what_is_known_of_their_request(aborted):
    assert aborted({}, request("a", [5])) == ["a"]
