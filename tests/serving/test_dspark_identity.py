"""Greedy DSpark output equals target-only output token for token, whatever the drafts are.

Two servers of the same checkpoint, one of them speculating. Drafts are the model's own or forced
ones (`dspark.speculation.forced_drafts`), request by request.
"""

import itertools
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving.prompts import MIXED, prompt
from serving.test_target_only import CHUNKED, ids, wait_idle

from dspark.commands.local_server import Output

# The pair of servers that most tests share.
TARGET = (*CHUNKED, "--enable-custom-logit-processor")
SPECULATE = (
    *TARGET,
    "--speculative-algorithm",
    "dspark",
    "--enable-metrics",
    "--enable-return-hidden-states",
    "--decode-log-interval",
    "1",
)
FORCED = (("DSPARK_FORCED_DRAFTS", "1"), ("DSPARK_VERIFY", "scheduled"))
PROMPTS = list(MIXED.values())
TOKENS = 40  # crosses a C128 boundary for several of the prompts, C4 boundaries for all


@pytest.fixture(scope="module")
def truth(serving) -> list[list[int]]:
    """What the target says on its own."""
    return ids(serving(TARGET).generate_batch(PROMPTS, TOKENS))


@pytest.fixture(scope="module")
def server(serving):
    return serving(SPECULATE, FORCED)


@pytest.fixture
def budget(server):
    """Function (share): verify only this share of all drafts, until the test ends."""

    def set_share(share: float) -> None:
        body = {"server_args": {"dspark_force_budget_frac": share}}
        server.request("/set_internal_state", body)

    yield set_share
    set_share(1.0)


def forced(server, kinds: list[str | None], truth, tokens: int = TOKENS) -> list[Output]:
    """One batch; each request drafts as its kind says, None by the model."""
    parameters = [
        {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}
        | ({} if kind is None else {"custom_params": {"draft": kind, "continuation": right}})
        for kind, right in zip(kinds, truth, strict=True)
    ]
    answers = server.request("/generate", {"input_ids": PROMPTS, "sampling_params": parameters})
    return [Output(a["output_ids"], a.get("text", ""), a["meta_info"]) for a in answers]


def accept_lengths(outputs) -> list[float]:
    return [output.meta["spec_accept_length"] for output in outputs]


def test_drafts_of_the_model(server, truth):
    assert ids(server.generate_batch(PROMPTS, TOKENS)) == truth


@pytest.mark.parametrize(
    ("kind", "shortest", "longest"),
    [
        ("oracle", 5.5, 6.0),
        ("wrong", 1.0, 1.05),
        ("wrong@2", 2.8, 3.1),
        ("random", 1.0, 1.5),
        ("none", 1.0, 1.05),
    ],
)
def test_forced_drafts(server, truth, kind, shortest, longest):
    outputs = forced(server, [kind] * len(PROMPTS), truth)
    assert ids(outputs) == truth
    assert all(shortest <= n <= longest for n in accept_lengths(outputs))


def test_every_kind_of_draft_in_one_batch(server, truth):
    kinds = ["oracle", "wrong", None, "wrong@1", "random", "wrong@4", "oracle", None]
    assert ids(forced(server, kinds, truth)) == truth


def test_drafting_stops_and_goes_on_in_the_middle_of_requests(server, truth):
    """Short requests that draft come and go beside long ones that only draft beside them."""
    right = [{"draft": "oracle", "continuation": truth[i]} for i in range(3)]
    with ThreadPoolExecutor(4) as threads:
        long = threads.submit(
            server.generate_batch, PROMPTS[4:], TOKENS, custom_params={"draft": "none"}
        )
        short = [
            threads.submit(server.generate, PROMPTS[i], 12, custom_params=wish)
            for i, wish in enumerate(right)
        ]
        assert [job.result().ids for job in short] == [text[:12] for text in truth[:3]]
        assert ids(long.result()) == truth[4:]


@pytest.mark.parametrize("share", [0.001, 0.3, 0.7])
def test_verify_budgets_of_nothing_and_a_part(server, truth, budget, share):
    budget(share)
    server.request("/set_internal_state", {"server_args": {"dspark_clear_info_records": True}})
    outputs = forced(server, ["oracle", None] * 4, truth)
    assert ids(outputs) == truth
    wait_idle(server)
    section = server.info()["internal_states"][0]["dspark"]
    assert section["verify_rows_saved"] > 0
    if share < 0.01:
        assert section["verify_rows_run"] == section["verify_steps"]
        assert set(accept_lengths(outputs)) == {TOKENS / (TOKENS - 1)}  # one token a step


WISHES = (
    {},
    {"frequency_penalty": 0.6, "repetition_penalty": 1.3},
    {"temperature": 1.0, "sampling_seed": 11},
    {"temperature": 0.8, "sampling_seed": 12, "top_p": 0.9, "top_k": 40},
    {"regex": "[ab]{12}", "ignore_eos": False},
    {"logit_bias": {"7": 4.0}},
    {"temperature": 1.2, "sampling_seed": 13, "presence_penalty": 0.4},
    {"temperature": 1.0, "sampling_seed": 14, "regex": "[0-9]{20}", "ignore_eos": False},
)


def answered_alike(server, target, wishes, logprobs: bool) -> list[dict]:
    """Answers of `server` to one batch of these wishes, which must be the target's too."""
    plain = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 24}
    body = {
        "input_ids": PROMPTS[: len(wishes)],
        "sampling_params": [plain | wish for wish in wishes],
        "return_logprob": logprobs,
        "top_logprobs_num": 2,
    }
    ours, theirs = server.request("/generate", body), target.request("/generate", body)
    assert [a["output_ids"] for a in ours] == [a["output_ids"] for a in theirs]
    if logprobs:
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert [a["meta_info"][name] for a in ours] == [a["meta_info"][name] for a in theirs]
    return ours


@pytest.mark.parametrize("logprobs", [False, True], ids=["tokens", "logprobs"])
def test_nothing_is_drafted_for_every_kind_of_request(serving, server, logprobs):
    none = {"custom_params": {"draft": "none"}}
    answered_alike(server, serving(TARGET), [wish | none for wish in WISHES], logprobs)


@pytest.mark.parametrize("wishes", [WISHES[:1] + WISHES[2:4], WISHES], ids=["chosen", "adjusted"])
@pytest.mark.parametrize("share", [0.001, 0.4])
@pytest.mark.parametrize("logprobs", [False, True], ids=["tokens", "logprobs"])
def test_rows_are_left_out_beside_every_kind_of_request(
    serving, server, budget, wishes, share, logprobs
):
    budget(share)
    ours = answered_alike(server, serving(TARGET), wishes, logprobs)
    assert all(a["meta_info"]["spec_cap_length"] < 6 for a in ours)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_order_of_arrival(server, truth, reverse):
    order = list(reversed(range(8))) if reverse else list(range(8))
    server.flush_cache()
    outputs = server.generate_concurrently([PROMPTS[i] for i in order], [TOKENS] * 8)
    assert ids(outputs) == [truth[i] for i in order]


def test_batches_of_every_size(server, truth):
    """Requests leave one by one, so the batch shrinks from 8 to 1."""
    lengths = [5 * (i + 1) for i in range(8)]
    outputs = server.generate_concurrently(PROMPTS, lengths)
    assert ids(outputs) == [out[:n] for out, n in zip(truth, lengths, strict=True)]


@pytest.mark.parametrize(
    "together", [16, *(pytest.param(n, marks=pytest.mark.deep) for n in (1, 4))]
)
def test_one_prompt_many_times(server, truth, together):
    """More requests than slots, so that they wait, share a prefix and meet others mid-way."""
    server.flush_cache()
    outputs = [
        out
        for _ in range(16 // together)
        for out in server.generate_concurrently([PROMPTS[6]] * together, [TOKENS] * together)
    ]
    assert {tuple(out.ids) for out in outputs} == {tuple(truth[6])}


def test_cached_prefix_drafts_as_well_as_a_cold_one(server, truth):
    """The draft's own state comes with the prefix: same tokens, same acceptance."""
    server.flush_cache()
    cold = [server.generate(p, TOKENS) for p in PROMPTS[-3:]]
    hit = [server.generate(p, TOKENS) for p in PROMPTS[-3:]]
    assert [o.meta["cached_tokens"] for o in hit] == [256, 256, 512]
    assert ids(cold) == ids(hit) == truth[-3:]
    assert [o.meta["spec_correct_drafts_histogram"] for o in cold] == [
        o.meta["spec_correct_drafts_histogram"] for o in hit
    ]


def test_running_requests_decode_between_the_chunks_of_a_long_prompt(serving, server):
    long = prompt(1500, seed=15)
    expected = serving(TARGET).generate(long, 4).ids
    slowly = {"custom_params": {"draft": "random"}}  # one token a step
    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(server.generate_batch, PROMPTS[:3], 80, **slowly)
        while server.load()["num_running_reqs"] < 3:
            time.sleep(0.05)
        before = len(server.log())
        assert server.generate(long, 4).ids == expected
        batches = re.findall(r"(Prefill|Decode) batch", server.log()[before:])
        job.result()
    assert batches.count("Prefill") == 6
    neighbours = set(itertools.pairwise(batches))
    assert ("Prefill", "Decode") in neighbours
    assert ("Prefill", "Prefill") not in neighbours


def test_after_an_abort_in_the_middle_of_a_block(server, truth):
    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(server.generate, prompt(300, 9), 2000, "to-abort")
        while server.load()["num_running_reqs"] == 0:
            time.sleep(0.05)
        server.abort("to-abort")
        assert job.result().meta["finish_reason"]["type"] == "abort"
    wait_idle(server)
    assert ids(server.generate_batch(PROMPTS, TOKENS)) == truth


def test_a_prompt_with_the_noise_token_in_it(serving, server):
    """Token 511 fills draft blocks; in a prompt it is a token like any other."""
    noisy = prompt(60, seed=60)
    noisy[10:30:3] = [511] * 7
    assert server.generate(noisy, 24).ids == serving(TARGET).generate(noisy, 24).ids


def test_pools_return_to_their_start(server):
    assert wait_idle(server)["num_used_tokens"] == 0
    server.flush_cache()
    log = server.log()
    assert "leak" not in log.lower()
    assert "Traceback" not in log


def test_what_an_operator_sees(server):
    section = server.info()["internal_states"][0]["dspark"]
    assert (section["block_size"], section["depth"]) == (5, 5)
    assert section["verify_mode"] == "scheduled"
    assert 1.0 <= section["mean_accepted_length"] <= 6.0
    steps, run, saved = (section[f"verify_{n}"] for n in ("steps", "rows_run", "rows_saved"))
    assert steps <= run
    assert run + saved == 6 * steps
    assert len(section["acceptance_per_position"]) == 5
    by_position = section["acceptance_per_position"]
    assert by_position == sorted(by_position, reverse=True)
    assert {"warning", "stuck_steps"} <= section.keys()
    tested = section["online_calibration"]["greedy"]["tested"]
    assert tested[0] > 0
    assert tested == sorted(tested, reverse=True)
    metrics = server.request("/metrics")
    for name in ("spec_accept_length", "spec_accept_rate", "spec_cap_length"):
        assert f"sglang:{name}" in metrics
    counted = dict(re.findall(r"^dspark:(\w+)_total\{[^}]*\} (\S+)$", metrics, re.MULTILINE))
    assert float(counted["verify_steps"]) >= steps > 0
    assert float(counted["verify_rows"]) >= run
    reached = re.findall(
        r'^dspark:drafts_accepted_total\{.*position="(\d)"\}', metrics, re.MULTILINE
    )
    assert sorted(reached) == ["1", "2", "3", "4", "5"]


@pytest.mark.deep
def test_clients_that_leave_in_the_middle(server, truth):
    """60 requests aborted at random moments beside a control that must not notice."""
    chance = random.Random(31)

    def leave(i: int) -> None:
        events = server.stream(prompt(chance.randrange(1, 400), seed=1000 + i), 200)
        for _, _event in zip(range(chance.randrange(0, 15)), events, strict=False):
            pass
        events.close()  # drops the connection

    with ThreadPoolExecutor(4) as leavers, ThreadPoolExecutor(1) as control:
        jobs = [leavers.submit(leave, i) for i in range(60)]
        outputs = [control.submit(server.generate, PROMPTS[4], TOKENS) for _ in range(6)]
        assert [job.result().ids for job in outputs] == [truth[4]] * 6
        for job in jobs:
            job.result()
    server.request("/abort_request", {"rid": "", "abort_all": True})
    assert wait_idle(server)["num_used_tokens"] == 0
    assert ids(server.generate_batch(PROMPTS, TOKENS)) == truth
    assert "Traceback" not in server.log()
