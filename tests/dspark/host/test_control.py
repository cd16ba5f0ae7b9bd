"""Refusals of calls that come past HTTP: SGLang's Engine uses the same manager."""

import asyncio
from types import SimpleNamespace

import pytest

from dspark.host import control_hooks
from dspark.host.control import NOT_SERVED, abort_behind_a_pause, find_delay_fault
from dspark.host.refusal import NotServed


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(control_hooks, "manager_is_ours", lambda manager: True)
    return SimpleNamespace(tokenizer_manager=SimpleNamespace())


def never(*args, **kwargs):
    raise AssertionError("SGLang's own code must not run")


@pytest.mark.parametrize("method", NOT_SERVED)
def test_the_engine_raises_the_sentence(engine, method):
    def original(*args, **kwargs):
        never()

    original.__name__ = method
    with pytest.raises(NotServed, match=r"^sglang-dspark does not serve .*\.$"):
        control_hooks.refuse_control(original, engine.tokenizer_manager, None)


def test_weights_are_not_saved(engine):
    with pytest.raises(NotServed, match="does not serve saving weights"):
        control_hooks.refuse_saving(never, engine, path="/x")


def test_other_models_are_saved(monkeypatch):
    monkeypatch.setattr(control_hooks, "manager_is_ours", lambda manager: False)
    engine = SimpleNamespace(tokenizer_manager=None)
    assert control_hooks.refuse_saving(lambda _, **asked: asked, engine, path="/x") == {
        "path": "/x"
    }


@pytest.mark.parametrize(("seconds", "fault"), [(None, 0), (0, 0), (10, 0), (11, 1), (1e999, 1)])
def test_delays_that_would_look_like_a_hang(seconds, fault):
    assert bool(find_delay_fault(seconds)) == bool(fault)


@pytest.mark.parametrize(("paused", "sent"), [(True, ["ContinueGenerationReqInput"]), (False, [])])
def test_a_paused_scheduler_moves_on_before_it_is_emptied(paused, sent):
    order = []

    async def dispatch(message):
        order.append(type(message).__name__)

    async def original(manager, obj):
        order.append("abort")

    manager = SimpleNamespace(is_pause=paused, _async_dispatch_to_scheduler=dispatch)
    asyncio.run(abort_behind_a_pause(original, manager, None))
    assert order == [*sent, "abort"]
