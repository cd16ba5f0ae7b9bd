"""The properties of the state life cycle, by number.

One run of the state machine per scheduler mode checks all of them after every event; each test
asks for one: was it looked at, and did it hold? Properties that compare whole runs are in
`test_lifecycle_comparisons`.
"""

import pytest
from simulation.machine import run

PROPERTIES = {
    "I01": "spec_equivalence",
    "I02": "draft_consistency",
    "I03": "write_before_read",
    "I04": "clearing_is_redundant",
    "I05": "empty_at_first_use",
    "I07": "idempotence",
    "I08": "rollback_locality",
    "I09": "no_leak_no_double",
    "I10": "generation_monotonic",
    "I12": "order",
    "I13": "frontier",
    "I14": "published_pages",
    "I15": "padding",
    "I16": "window",
    "I17": "host_below_device",
    "I18": "bounded_work",
    "I19": "all_or_nothing_load",
    "check()": "own_check_agrees",
}


@pytest.mark.parametrize("deep", [False, pytest.param(True, marks=pytest.mark.deep)])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda p: f"{p}_{PROPERTIES[p]}")
def test_property(prop, overlap, deep):
    if prop == "check()" and overlap:
        pytest.skip("check() looks at state between two executed forwards")
    made, violation = run(overlap, deep)
    if violation is not None and violation.prop == prop:
        raise violation
    assert violation is None, f"not judged: {violation.prop} failed first"
    assert made[prop] > 0
