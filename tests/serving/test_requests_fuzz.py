"""Random requests, both modes beside each other: same status, same tokens, nobody else disturbed.

Each round sends some requests to both servers at once, while each server answers a plain
greedy request, and again one when the round is over.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from serving.prompts import prompt
from serving.request_fuzz import agreed, ask, sent, sentence
from serving.test_dspark_identity import FORCED, SPECULATE, TARGET
from serving.test_target_only import wait_idle

CONTROL = prompt(30, seed=99)
DURING, AFTER = 16, 4  # tokens of the control requests
MOST, ROUNDS = 16, 14  # requests of a round, at least half as many: 171 in all
DEEP_MOST, DEEP_ROUNDS, PIECES = 24, 31, 10


@pytest.fixture(scope="module")
def servers(serving):
    return [serving(TARGET), serving(SPECULATE, FORCED)]


@pytest.fixture(scope="module")
def control(servers):
    """What the control request says when nobody else asks."""
    answers = [server.generate(CONTROL, DURING).ids for server in servers]
    assert answers[0] == answers[1]
    return answers[0]


def check_round(servers, control, batch) -> None:
    with ThreadPoolExecutor(2 * len(batch) + 2) as threads:
        meanwhile = [threads.submit(server.generate, CONTROL, DURING) for server in servers]
        jobs = [[threads.submit(ask, server.url, r) for server in servers] for r in batch]
        answers = [[job.result() for job in pair] for pair in jobs]
        assert [job.result().ids for job in meanwhile] == [control, control]
    for request, (target, dspark) in zip(batch, answers, strict=True):
        assert agreed(dspark, request.determined) == agreed(target, request.determined), request
        assert target.status == 200 or 400 <= target.status < 500, (request, target)
        assert target.status == 200 or sentence(target.said), (request, target)
    after = [server.generate(CONTROL, AFTER).ids for server in servers]
    assert after == [control[:AFTER]] * 2


def run(servers, control, rounds: int, most: int, number: int) -> None:
    logs_before = [len(server.log()) for server in servers]
    sizes: list[int] = []  # of the rounds begun

    @seed(number)
    @settings(
        max_examples=rounds,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a server has a past, so that nothing smaller need fail alike
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(sent(), min_size=most // 2, max_size=most))
    def play(batch):
        sizes.append(len(batch))
        check_round(servers, control, batch)
        print(f"seed {number}: {sum(sizes)} requests agreed in both modes, {len(sizes)} rounds")

    play()
    for server, start in zip(servers, logs_before, strict=True):
        wait_idle(server)
        assert "Traceback" not in server.log()[start:]


def test_random_requests(servers, control):
    run(servers, control, ROUNDS, MOST, number=14)


@pytest.mark.deep
@pytest.mark.parametrize("piece", range(PIECES))
def test_many_random_requests(servers, control, piece):
    run(servers, control, DEEP_ROUNDS, DEEP_MOST, number=100 + piece)
