"""What a server runs before it is ready."""

import asyncio
import random
from types import SimpleNamespace

import pytest

from dspark.host import warm_up
from dspark.kernels.attention.kernel import DECODE_ROWS
from dspark.kernels.moe.kernel import FEW_PAIRS, MANY_PAIRS, SORTED_PAIRS


@pytest.mark.parametrize(
    "edge", [DECODE_ROWS, *(n // 6 for n in (FEW_PAIRS, MANY_PAIRS, SORTED_PAIRS))]
)
def test_both_sides_of_every_range_of_rows_run(edge):
    """Six experts a row; a kernel that changes there is compiled on either side."""
    assert {edge, edge + 1} <= set(warm_up.PROMPT_ROWS)


def test_counts_that_triton_tells_apart_run():
    rows = set(warm_up.PROMPT_ROWS)
    assert 1 in rows
    for low, high in ((11, 64), (86, 341), (342, 513)):
        some = {n for n in rows if low <= n <= high}
        assert {n % 16 == 0 for n in some} == {True, False}


@pytest.mark.parametrize(
    ("chunk", "context", "requests"),
    [(2048, 100_000, 8), (512, 300, 1), (0, 8192, 48), (256, 20, 3)],
)
def test_groups_fit_the_server(chunk, context, requests):
    longest = context - warm_up.NEW_TOKENS - 1
    found = warm_up.groups(chunk, longest, requests)
    for group in found:
        assert len(group.lengths) <= requests
        assert all(1 <= n <= context - warm_up.NEW_TOKENS - 1 for n in group.lengths)
    sampled = [g for g in found if g.sampling["temperature"] > 0]
    assert {len(g.lengths) for g in sampled} >= {1, requests}
    alone = {g.lengths[0] for g in found if len(g.lengths) == 1}
    if chunk and 2 * chunk + 20 < context:
        assert {chunk, chunk + 1} <= alone


class Manager:
    """The part of SGLang's TokenizerManager that a warm-up talks to."""

    def __init__(self, algorithm):
        self.server_args = SimpleNamespace(
            chunked_prefill_size=64, max_running_requests=4, speculative_algorithm=algorithm
        )
        self.model_config = SimpleNamespace(vocab_size=100, context_len=200)
        self.max_req_input_len = 150
        self.asked, self.flushed, self.changed = [], 0, []

    async def generate_request(self, request, _):
        assert not self.flushed
        self.asked.append(request)
        if len(request.input_ids) == 17:
            raise ValueError("no room")
        yield {}

    async def flush_cache(self, timeout_s):
        self.flushed += 1

    async def set_internal_state(self, change):
        self.changed.append(change.server_args)


@pytest.mark.parametrize("algorithm", [None, "DSPARK"])
def test_every_request_is_asked_once_and_nothing_is_remembered(algorithm, caplog):
    manager = Manager(algorithm)
    asyncio.run(warm_up.run("null", manager))
    groups = warm_up.groups(64, 149, 4)  # the server admits what is shorter than 150
    assert len(manager.asked) == sum(len(g.lengths) for g in groups)
    assert max(max(r.input_ids) for r in manager.asked) < 100
    assert max(len(r.input_ids) for r in manager.asked) == 2 * 64 + 17
    assert "A warm-up request of 17 tokens failed: no room" in caplog.text
    assert manager.flushed == 1
    assert manager.changed == ([] if algorithm is None else [{"dspark_clear_info_records": 1}])


def test_no_two_prompts_share_a_prefix():
    group = warm_up.Group((30, 30, 30), warm_up.SAMPLING[0])
    prompts = [tuple(b["input_ids"]) for b in warm_up.bodies(group, 1000, random.Random(1))]
    assert len({p[:3] for p in prompts}) == 3


def test_other_warm_ups_stay():
    args = SimpleNamespace(warmups=None)
    warm_up.ask_for(args)
    assert args.warmups == "dspark"
    warm_up.ask_for(args)
    assert args.warmups == "dspark"
    args.warmups = "voice_chat"
    warm_up.ask_for(args)
    assert args.warmups == "dspark,voice_chat"
