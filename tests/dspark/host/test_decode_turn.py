"""When running requests decode between two chunks of a long prompt."""

from types import SimpleNamespace

import pytest

from dspark.host.decode_turn import is_due


def scheduler(chunked=True, last="extend"):
    mode = SimpleNamespace(is_extend=lambda: last == "extend")
    return SimpleNamespace(
        chunked_req=object() if chunked else None,
        last_batch=SimpleNamespace(forward_mode=mode) if last else None,
    )


def running(finished=(True, False), memory=True, prefill_only=False):
    asked = []

    def check_decode_mem(selected_indices):
        asked.extend(selected_indices)
        return memory

    return SimpleNamespace(
        reqs=[SimpleNamespace(finished=lambda done=done: done) for done in finished],
        is_prefill_only=prefill_only,
        check_decode_mem=check_decode_mem,
        asked=asked,
    )


def test_after_a_chunk_while_others_run():
    batch = running()
    assert is_due(scheduler(), batch)
    assert batch.asked == [1]  # a finished request owns no pages to count


@pytest.mark.parametrize(
    ("state", "batch"),
    [
        ({"chunked": False}, {}),
        ({"last": "decode"}, {}),
        ({"last": None}, {}),
        ({}, {"finished": ()}),
        ({}, {"finished": (True, True)}),
        ({}, {"memory": False}),
        ({}, {"prefill_only": True}),
    ],
    ids=["no-chunks", "just-decoded", "first", "nobody", "all-done", "no-memory", "scoring"],
)
def test_otherwise_the_next_chunk_runs(state, batch):
    assert not is_due(scheduler(**state), running(**batch))
