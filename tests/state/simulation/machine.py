"""The server as a Hypothesis state machine: any order of events, all checks after each."""

from collections import Counter
from functools import cache
from typing import ClassVar, NamedTuple

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from .checks import Violation
from .driver import LONG, SHORT
from .server import ALL_CLEARS, LOAD_STEPS, Server, prompt

FAST_EXAMPLES, DEEP_EXAMPLES = 30, 2000
FAST_EVENTS, DEEP_EVENTS = 30, 50

GEOMETRIES = [
    {"verify_width": 6, "c128": 136},
    {"verify_width": 6, "c128": 132},
    {"verify_width": 10, "c128": 136},
    {"verify_width": 1, "c4": 8, "c128": 128},
]
any_request = st.integers(0, 3)


class StateMachine(RuleBasedStateMachine):
    """Subclasses choose the scheduler; the machine draws everything else."""

    overlap: ClassVar[bool]
    made: ClassVar[Counter[str]]

    def __init__(self):
        super().__init__()
        self.server = Server()

    @initialize(
        sizes=st.sampled_from(GEOMETRIES),
        pages=st.integers(8, 16),
        clears=st.one_of(st.just(ALL_CLEARS), st.frozensets(st.sampled_from(sorted(ALL_CLEARS)))),
        poisoned=st.booleans(),
        twice=st.booleans(),
        padding=st.integers(0, 3),
        warm=st.lists(st.sampled_from(SHORT + LONG), max_size=3),
        squeezed=st.booleans(),
    )
    def start(self, sizes, pages, clears, poisoned, twice, padding, warm, squeezed):
        """A server that has served `warm` prompts, perhaps with their pages on the host."""
        self.server = Server(
            overlap=self.overlap,
            full_pages=pages + 4,
            window_pages=pages,
            clears=clears,
            poisoned=poisoned,
            twice=twice,
            padding=padding,
            debug=clears == ALL_CLEARS and not poisoned,
            **sizes,
        )
        for family, length in enumerate(warm):
            self.server.admit(prompt(family % 2, length))
            self.server.chunk(600)
        self.server.verify([3], [sizes["verify_width"]])
        if squeezed:
            self._finish_all()
            self.server.squeeze()

    @rule(
        family=st.integers(0, 1),
        length=st.sampled_from(SHORT + LONG),
        fail_load=st.one_of(st.none(), st.integers(0, len(LOAD_STEPS) - 1)),
    )
    def admit(self, family, length, fail_load):
        self.server.admit(prompt(family, length), fail_load)

    @rule(family=st.integers(0, 1), length=st.sampled_from(LONG))
    def admit_and_prefill(self, family, length):
        self.server.admit(prompt(family, length))
        self.server.chunk(600, 4)

    @rule(tokens=st.sampled_from([1, 3, 127, 128, 131, 256, 300, 600]), requests=st.integers(1, 3))
    def chunk(self, tokens, requests):
        self.server.chunk(tokens, requests)

    @rule(
        accepts=st.lists(st.integers(1, 10), min_size=4, max_size=4),
        lengths=st.lists(st.integers(1, 10), min_size=4, max_size=4),
        full_width=st.booleans(),
        steps=st.integers(1, 6),
    )
    def verify(self, accepts, lengths, full_width, steps):
        rows = self.server.state.geometry.verify_width
        lengths = [rows] if full_width else [min(n, rows) for n in lengths]
        for _ in range(steps):
            self.server.verify(accepts, lengths)
            self.server.check()

    @precondition(lambda self: self.server.live)
    @rule(request=any_request, cut=st.integers(0, 3))
    def finish(self, request, cut):
        self.server.finish(self._live(request), cut)

    @precondition(lambda self: self.server.live)
    @rule(request=any_request)
    def abort(self, request):
        self.server.abort(self._live(request))

    @precondition(lambda self: self.server.live)
    @rule(request=any_request)
    def retract(self, request):
        self.server.retract(self._live(request))

    @precondition(lambda self: self.server.waiting)
    @rule(fail_load=st.one_of(st.none(), st.integers(0, len(LOAD_STEPS) - 1)))
    def readmit(self, fail_load):
        self.server.readmit(fail_load)

    @rule(
        family=st.integers(0, 1),
        length=st.sampled_from(LONG),
        fail_load=st.one_of(st.none(), st.integers(0, len(LOAD_STEPS) - 1)),
    )
    def come_back_from_host(self, family, length, fail_load):
        """Everybody finishes, all pages go to the host, then a known prefix is asked for."""
        self.admit_and_prefill(family, length)
        self._finish_all()
        self.server.squeeze()
        self.server.admit(prompt(family, length), fail_load)

    @rule()
    def idle(self):
        self.server.idle()

    @rule()
    def slide(self):
        self.server.slide()

    @precondition(lambda self: self.server.tree.root.children)
    @rule()
    def evict(self):
        self.server.evict()

    @precondition(lambda self: self.server.tree.root.children)
    @rule()
    def tombstone(self):
        self.server.tombstone()

    @precondition(lambda self: self.server.tree.root.children)
    @rule()
    def backup(self):
        self.server.backup()

    @precondition(lambda self: self.server.tree.root.children)
    @rule()
    def squeeze(self):
        self.server.squeeze()

    @precondition(lambda self: not self.server.live)
    @rule()
    def flush(self):
        self.server.flush()

    @precondition(lambda self: not self.server.live)
    @rule()
    def resume(self):
        self.server.resume()

    @invariant()
    def holds(self):
        self.server.check()

    def teardown(self):
        self.server.settle()
        self.server.check()
        self.made.update(self.server.checks.made)
        if self.server.twice:
            self.made["idempotence"] += 1

    def _finish_all(self):
        for request in list(self.server.live):
            if request.running:
                self.server.finish(request)
            else:
                self.server.abort(request)
        self.server.verify([3], [1])
        self.server.settle()

    def _live(self, index: int):
        return self.server.live[index % len(self.server.live)]


class Result(NamedTuple):
    made: Counter[str]  # checks per property
    violation: Violation | None


@cache
def run(overlap: bool, deep: bool) -> Result:
    """All examples of one scheduler mode, once a session."""
    machine: type[StateMachine] = type("Machine", (StateMachine,), {})
    machine.overlap, machine.made = overlap, Counter()
    options = settings(
        max_examples=DEEP_EXAMPLES if deep else FAST_EXAMPLES,
        stateful_step_count=DEEP_EVENTS if deep else FAST_EVENTS,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    try:
        run_state_machine_as_test(machine, settings=options)
    except Violation as violation:
        return Result(machine.made, violation)
    return Result(machine.made, None)
