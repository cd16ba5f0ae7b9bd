"""Batches by which a server measures its steps, and when they are left out."""

import asyncio
from types import SimpleNamespace

import pytest

from dspark.host import control, step_hooks, step_measure, warm_up

TOKENS = 28  # of each request: 20 steps and 8 to gather


class Manager:
    """The part of SGLang's TokenizerManager that the measurement talks to.

    seconds: a batch of requests takes so long by the test's clock.
    """

    def __init__(self, clock, section, seconds=0.5, most=8):
        self.server_args = SimpleNamespace(max_running_requests=most, device="cpu")
        self.model_config = SimpleNamespace(vocab_size=100)
        self.section, self.clock, self.seconds = section, clock, seconds
        self.told, self.asked, self.batches = [], [], []
        self.running, self.stuck = 0, False
        self.aborted = asyncio.Event()

    async def get_internal_state(self):
        return [{"dspark": self.section}]

    async def set_internal_state_communicator(self, request):
        self.told.append(request.server_args)

    async def set_internal_state(self, request):
        self.told.append(request.server_args)

    async def flush_cache(self, timeout_s):
        self.told.append("flush")

    def abort_request(self, abort_all):
        assert abort_all
        self.aborted.set()

    async def generate_request(self, request, _):
        assert self.told == [{step_measure.KEY: 1}]
        self.asked.append(request)
        self.running += 1
        await asyncio.sleep(0)
        together, self.running = self.running, 0
        if together:  # the first of a batch to go on
            self.batches.append(together)
            self.clock.now += self.seconds
        if self.stuck:
            await self.aborted.wait()
        yield {}


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(step_measure, "monotonic", lambda: made.now)
    return made


WANTED = {"step_cost": "not measured", "depth": 5}
ENDED = [{step_measure.KEY: 0}, "flush", warm_up.FORGET]


def test_batches_of_every_size_run_a_few_times(clock):
    manager = Manager(clock, WANTED)
    asyncio.run(step_measure.run("null", manager))
    assert manager.batches == [1, 8, 4] * step_measure.PASSES
    assert manager.told == [{step_measure.KEY: 1}, *ENDED]
    assert {r.sampling_params["max_new_tokens"] for r in manager.asked} == {TOKENS}
    assert len({tuple(r.input_ids) for r in manager.asked}) == len(manager.asked)


def test_no_batch_begins_after_the_time_is_over(clock):
    manager = Manager(clock, WANTED, seconds=3.0)
    asyncio.run(step_measure.run("null", manager))
    assert manager.batches == [1, 8, 4]  # the third ends after 9 of 8 seconds
    assert manager.told[1:] == ENDED


def test_a_batch_that_does_not_end_is_aborted_and_what_was_measured_counts(clock, monkeypatch):
    monkeypatch.setitem(step_measure.SECONDS, "cpu", 0.05)
    manager = Manager(clock, WANTED, seconds=0.0)
    manager.stuck = True
    asyncio.run(step_measure.run("null", manager))
    assert manager.batches == [1]
    assert manager.aborted.is_set()
    assert manager.told[1:] == ENDED


@pytest.mark.parametrize("found", [None, "given", "measured at an earlier start"])
def test_a_server_that_knows_its_costs_or_needs_none_measures_nothing(clock, found):
    manager = Manager(clock, {"step_cost": found, "depth": 5})
    asyncio.run(step_measure.run("null", manager))
    assert manager.told == manager.asked == []


@pytest.mark.parametrize(
    ("most", "expected"), [(1, [1]), (6, [1, 4, 6]), (8, [1, 8, 4]), (48, [1, 8, 4, 16, 32])]
)
def test_sizes_fit_the_server(most, expected):
    assert step_measure.sizes(most) == expected


@pytest.mark.parametrize(
    ("verify", "algorithm", "named", "expected"),
    [
        (None, "DSPARK", None, None),
        ("static", "DSPARK", None, None),
        ("scheduled", None, None, None),
        ("scheduled", "DSPARK", None, "dspark-steps"),
        ("scheduled", "DSPARK", "dspark,other", "dspark,other,dspark-steps"),
        ("cap-accept", "DSPARK", "dspark-steps", "dspark-steps"),
    ],
)
def test_it_is_asked_for_where_a_schedule_may_need_it(
    monkeypatch, verify, algorithm, named, expected
):
    monkeypatch.delenv("DSPARK_VERIFY", raising=False)
    if verify:
        monkeypatch.setenv("DSPARK_VERIFY", verify)
    args = SimpleNamespace(speculative_algorithm=algorithm, warmups=named)
    step_measure.ask_for(args)
    assert args.warmups == expected


def test_nobody_else_may_begin_it():
    assert step_measure.KEY in control.find_settings_fault({step_measure.KEY: 1})


@pytest.mark.parametrize("begin", [0, 1])
def test_the_scheduler_tells_its_worker(monkeypatch, begin):
    told = []
    scheduler = SimpleNamespace(draft_worker=SimpleNamespace(measure_steps=told.append))
    monkeypatch.setattr(step_hooks, "is_ours", lambda: True)
    request = SimpleNamespace(server_args={step_measure.KEY: begin})
    assert step_hooks.measure_steps(None, scheduler, request).updated
    assert told == [bool(begin)]
    other = SimpleNamespace(server_args={"dspark_clear_info_records": 1})
    assert step_hooks.measure_steps(lambda *_: "theirs", scheduler, other) == "theirs"
