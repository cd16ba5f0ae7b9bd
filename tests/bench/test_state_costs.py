"""The bytes an event is said to write are the bytes it changes."""

import torch

from dspark.bench.state_costs import events, flash
from dspark.state import StateLifecycle


def test_claimed_bytes_are_the_bytes_changed():
    state = StateLifecycle(flash(slots=2, pages=2), "cpu")
    for name, claimed, call in events(state, "cpu"):
        for rows in state.pools.tensors.values():
            rows.fill_(1.0)
        call()
        changed = sum(
            int((rows != 1).all(-1).sum()) * rows.shape[-1] * rows.element_size()
            for rows in state.pools.tensors.values()
        )
        assert changed == claimed, name
        assert torch.isfinite(state.pools.tensors["c128"][:, 0]).all(), "padding is nobody's"
