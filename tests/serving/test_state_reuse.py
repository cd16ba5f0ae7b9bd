"""Slots and pages that change hands all the time give the same tokens in any order and mode.

Eight slots and 24 pages serve hundreds of short requests, with every state invariant checked
before every forward (STATE_DEBUG) and SGLang's own leak checks on.
"""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving.test_target_only import CHUNKED, RETRACTING

SMALL_POOL = ("--max-running-requests", "8", "--max-total-tokens", "6144")
SPECULATE = ("--speculative-algorithm", "dspark")
CHECKED = (("STATE_DEBUG", "1"),)


def requests_of(count: int) -> list[tuple[list[int], int]]:
    """(prompt, new tokens): few tokens mostly, some across C4, C128 and page boundaries."""
    rng = random.Random(3)
    lengths = [rng.choice([1, 2, 3, 5, 7, 30, 124, 127, 129, 252, 258]) for _ in range(count)]
    return [([rng.randrange(2, 510) for _ in range(n)], rng.randint(1, 12)) for n in lengths]


def run(server, requests) -> list[list[int]]:
    outputs = server.generate_concurrently([p for p, _ in requests], [n for _, n in requests])
    return [output.ids for output in outputs]


@pytest.mark.parametrize(
    "count", [24, *(pytest.param(n, marks=pytest.mark.deep) for n in (48, 200))]
)
def test_order_mode_and_reuse_do_not_change_a_token(serving, count):
    requests = requests_of(count)
    target = serving(SMALL_POOL, CHECKED)
    expected = run(target, requests)
    assert [len(ids) for ids in expected] == [n for _, n in requests]
    assert run(target, requests[::-1])[::-1] == expected
    speculating = serving((*SMALL_POOL, *SPECULATE), CHECKED)
    assert run(speculating, requests) == expected
    assert run(speculating, requests[::-1])[::-1] == expected
    speculating.flush_cache()
    assert run(speculating, requests[:8]) == expected[:8]
    for server in (target, speculating):
        assert server.alive()
        assert "State check while idle" not in server.log()


@pytest.mark.deep
@pytest.mark.parametrize("retract", [False, True], ids=["", "retracting"])
def test_chunks_of_long_prompts_between_decode_steps(serving, retract):
    """Chunks, decode steps, retractions and aborts in one pool that cannot hold all at once."""
    rng = random.Random(5)
    requests = [
        ([rng.randrange(2, 510) for _ in range(rng.choice([5, 257, 700, 1100, 1500]))], 30)
        for _ in range(24)
    ]
    env = (*CHECKED, *(RETRACTING if retract else ()))
    expected = run(serving((*SMALL_POOL, *CHUNKED), CHECKED), requests)
    server = serving((*SMALL_POOL, *CHUNKED, *SPECULATE), env)
    with ThreadPoolExecutor(2) as threads:
        job = threads.submit(run, server, requests)
        for number in range(8):
            prompt = [rng.randrange(2, 510) for _ in range(1200)]
            leaving = threads.submit(server.generate, prompt, 20, f"leaving-{number}")
            for _ in range(3 * number):
                server.load()  # so that each is at another point when it is aborted
            server.abort(f"leaving-{number}")
            leaving.result()
        assert job.result() == expected
    server.flush_cache()
    assert "State check while idle" not in server.log()
    assert "Traceback" not in server.log()
