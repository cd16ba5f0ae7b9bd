"""A request of higher priority takes the place of a running one, which loses nothing by it."""

import itertools

import pytest
from serving.prompts import prompt
from serving.test_control import Stream
from serving.test_dspark_identity import FORCED
from serving.test_target_only import CHUNKED, wait_idle

pytestmark = pytest.mark.deep  # minutes: whole answers are preempted

TWO_AT_ONCE = (*CHUNKED, "--enable-priority-scheduling", "--max-running-requests", "2")
MODES = {
    "dspark": ((*TWO_AT_ONCE, "--speculative-algorithm", "dspark"), FORCED),
    "target-only": (TWO_AT_ONCE, ()),
}
TOKENS = 120
# What a preempted request asks for, beside the tokens: sampling parameters and other fields.
VICTIMS: dict[str, tuple[dict, dict]] = {
    "greedy": ({}, {}),
    "grammar": ({"regex": "[ab]{200}"}, {}),
    "penalties": ({"frequency_penalty": 0.7, "repetition_penalty": 1.2}, {}),
    "log probabilities": ({}, {"return_logprob": True, "top_logprobs_num": 2}),
    "stop": ({"stop": ["never written"]}, {}),
    "seeded": ({"temperature": 1, "sampling_seed": 5}, {}),
}
PROMPTS = {name: prompt(50 + 7 * i, seed=i) for i, name in enumerate(VICTIMS)}
WINNERS = [prompt(30, seed=20), prompt(600, seed=21), prompt(31, seed=22)]  # the second in chunks
WON = 20  # tokens


def start(server, name: str, **more) -> Stream:
    sampling, fields = VICTIMS[name]
    return Stream(server, PROMPTS[name], length=TOKENS, sampling=sampling, **fields, **more)


@pytest.fixture(scope="module")
def alone(serving):
    """Tokens of every request on its own, target-only."""
    server = serving(CHUNKED)
    victims = {name: start(server, name).finish()["output_ids"] for name in VICTIMS}
    return victims, [server.generate(p, WON).ids for p in WINNERS]


@pytest.fixture(params=["dspark", pytest.param("target-only", marks=pytest.mark.deep)])
def server(request, serving, alone):
    flags, env = MODES[request.param]
    server = serving(flags, env)
    yield server
    wait_idle(server)
    assert "Traceback" not in server.log()


def preempt(server, alone, pair: tuple[str, str], events: int, **low) -> None:
    """Two requests run; once each has sent `events` events, three others come before them."""
    truth, won = alone
    victims = [start(server, name, **low) for name in pair]
    for victim in victims:
        victim.wait_for(events)
    winners = [Stream(server, p, length=WON, priority=100) for p in WINNERS]
    assert [winner.finish()["output_ids"] for winner in winners] == won
    retracted = 0
    for name, victim in zip(pair, victims, strict=True):
        last = victim.finish()
        assert last["output_ids"] == truth[name], name
        lengths = [len(event["output_ids"]) for event in victim.events]
        assert lengths == sorted(set(lengths)), "no event repeats another"
        retracted += last["meta_info"]["num_retractions"]
        if "return_logprob" in VICTIMS[name][1]:
            assert len(last["meta_info"]["output_token_logprobs"]) == TOKENS
    assert retracted >= 1


@pytest.mark.parametrize(
    ("pair", "events"),
    [(("greedy", "grammar"), 1), (("penalties", "seeded"), 4), (("log probabilities", "stop"), 7)],
)
def test_preempted_requests_lose_nothing(server, alone, pair, events):
    preempt(server, alone, pair, events, priority=0)


def test_a_request_without_a_priority_is_the_lowest(server, alone):
    preempt(server, alone, ("greedy", "penalties"), 2)


@pytest.mark.deep
@pytest.mark.parametrize("events", [1, 2, 3, 5, 8, 14, 24])
def test_preempted_anywhere(server, alone, events):
    for pair in itertools.combinations(VICTIMS, 2):
        preempt(server, alone, pair, events, priority=0)
