"""The properties of the state life cycle, by name.

One run of the state machine per scheduler mode checks all of them after every event; each test
asks for one: was it looked at, and did it hold? Properties that compare whole runs are in
`test_lifecycle_comparisons`.
"""

import pytest
from simulation.machine import run

PROPERTIES = (
    "spec_equivalence",
    "draft_consistency",
    "write_before_read",
    "clearing_is_redundant",
    "empty_at_first_use",
    "idempotence",
    "rollback_locality",
    "no_leak_no_double",
    "generation_monotonic",
    "order",
    "frontier",
    "published_pages",
    "padding",
    "window",
    "host_below_device",
    "bounded_work",
    "all_or_nothing_load",
    "check()",
)


@pytest.mark.parametrize("deep", [False, pytest.param(True, marks=pytest.mark.deep)])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("prop", PROPERTIES)
def test_property(prop, overlap, deep):
    if prop == "check()" and overlap:
        pytest.skip("check() looks at state between two executed forwards")
    made, violation = run(overlap, deep)
    if violation is not None and violation.prop == prop:
        raise violation
    assert violation is None, f"not judged: {violation.prop} failed first"
    assert made[prop] > 0
