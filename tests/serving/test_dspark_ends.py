"""Where requests end, what is counted then, and what a retraction may not change: in both modes.

Forced drafts that follow the target's own text put every end at every offset of a run.
"""

import json
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from serving.prompts import VOCAB, prompt
from serving.test_dspark_identity import FORCED, PROMPTS, SPECULATE, TARGET
from serving.test_dspark_requests import ask, finish, poison

from dspark.bench.client import Step, Trace
from dspark.bench.throughput import accepted_length

TOKENS = 24
TEXT = PROMPTS[1]
OTHERS = PROMPTS[2:4]
KINDS = ("oracle", "wrong@2", None)


@pytest.fixture(scope="module")
def target(serving):
    return serving(TARGET)


@pytest.fixture(scope="module")
def server(serving):
    return serving(SPECULATE, FORCED)


@pytest.fixture(scope="module")
def said(target):
    """What the target says without any rule."""
    return ask(target, [TEXT])[0]


def forced(kind, continuation, rules):
    if kind is None:
        return rules
    return rules | {"custom_params": {"draft": kind, "continuation": continuation}}


def summary(answer):
    meta = answer["meta_info"]
    return (
        answer["output_ids"],
        answer["text"],
        meta["finish_reason"],
        meta["completion_tokens"],
        [entry[:2] for entry in meta["output_token_logprobs"]],
        len(meta["output_top_logprobs"]),
    )


def compare(target, server, rules, continuation):
    """Same answer from both modes, whatever is drafted."""
    wish = {"return_logprob": True, "top_logprobs_num": 2}
    expected = summary(ask(target, [TEXT], wish, **rules)[0])
    for kind in KINDS:
        answer = ask(server, [TEXT], wish, **forced(kind, continuation, rules))[0]
        assert summary(answer) == expected, kind
    return expected


@pytest.mark.parametrize("limit", [2, 3, 4, 10])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_grammar_that_ends_inside_a_run_and_the_limit(target, server, limit, ignore_eos):
    """Failed before: a limit of 2 gave 7 tokens; and target-only went on behind the end."""
    rules = {"regex": "[ab]{3}", "ignore_eos": ignore_eos}
    whole = ask(target, [TEXT], **rules)[0]
    assert whole["meta_info"]["finish_reason"]["type"] == "stop"
    ids = compare(target, server, rules | {"max_new_tokens": limit}, whole["output_ids"])[0]
    assert ids == whole["output_ids"][:limit]


def rules_of(said) -> list[dict]:
    text, ids = said["text"], said["output_ids"]
    late, early = text[9:11], text[4:6]
    return [
        {"stop": [late, early]},
        {"stop": [late], "stop_token_ids": [ids[3]], "ignore_eos": False},
        {"stop": [early], "stop_token_ids": [ids[-1]], "ignore_eos": False},
        {"stop": [late], "stop_regex": "[" + "".join(sorted(set(text[2:5]) - set("]^\\-"))) + "]"},
        {"stop": [late], "max_new_tokens": 5},
        {"stop_token_ids": [ids[4]], "ignore_eos": False, "max_new_tokens": 5},
    ]


@pytest.mark.parametrize("which", range(6))
def test_the_rule_that_comes_first_ends_the_request(target, server, said, which):
    rules = rules_of(said)[which]
    ids, *_ = compare(target, server, rules, said["output_ids"])
    assert len(ids) < TOKENS


IMPOSSIBLE = [
    ({"regex": "[ab]{3}", "min_new_tokens": 10}, "After 3 tokens the grammar admits nothing but"),
    ({"json_schema": '{"type": "boolean"}', "min_new_tokens": 12}, "admits nothing but an end"),
]


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("which", range(2))
def test_a_grammar_and_a_least_length_that_exclude_each_other(target, server, which, temperature):
    """Failed before: error 500 without a sentence target-only, and with DSpark."""
    rules, sentence = IMPOSSIBLE[which]
    said = []
    for one in (target, server):
        body = {
            "input_ids": [TEXT, *OTHERS],
            "sampling_params": [
                {"temperature": temperature, "max_new_tokens": TOKENS} | rules,
                *[{"temperature": 0, "ignore_eos": True, "max_new_tokens": 8}] * 2,
            ],
        }
        alone = body | {
            "input_ids": [TEXT],
            "sampling_params": body["sampling_params"][:1],
        }
        with pytest.raises(requests.HTTPError) as error:
            one.request("/generate", alone)
        assert error.value.response.status_code == 400
        said.append(error.value.response.json())
        with pytest.raises(requests.HTTPError):
            one.request("/generate", body)  # the others run to their end beside it
    assert said[0] == said[1]
    assert sentence in json.dumps(said[0])
    assert (
        ask(server, OTHERS, max_new_tokens=8)[0]["output_ids"]
        == ask(target, OTHERS, max_new_tokens=8)[0]["output_ids"]
    )


def test_a_least_length_that_the_grammar_can_reach(target, server):
    rules = {"regex": "[ab]{3}", "min_new_tokens": 3, "ignore_eos": False}
    assert finish(ask(server, [TEXT], **rules)) == finish(ask(target, [TEXT], **rules))


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "sampling_seed": 3}])
@pytest.mark.parametrize("biased", ["everything", "the first"])
def test_a_grammar_whose_tokens_are_all_biased_away(target, server, biased, sampling):
    """Far below everything else a token that the grammar admits is still the one to take."""
    rules = {"regex": "[ab]{3}", "ignore_eos": False} | sampling
    free = ask(target, [TEXT], **rules)[0]
    ids = range(VOCAB) if biased == "everything" else free["output_ids"][:1]
    rules["logit_bias"] = {str(token): -1e30 for token in ids}
    _, text, reason, *_ = compare(target, server, rules, free["output_ids"])
    assert re.fullmatch("[ab]{3}", text)
    assert reason["type"] == "stop"
    if biased == "the first":
        assert text != free["text"]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_target_only_fails_a_request_without_usable_logits_alone(target, temperature):
    """Failed before: token 0 was emitted, or sampling ended the server."""
    body = {
        "input_ids": TEXT,
        "sampling_params": {
            "temperature": temperature,
            "max_new_tokens": TOKENS,
            "custom_params": {"poison": 1},
        },
        "custom_logit_processor": poison(),
    }
    status = []

    def run():
        try:
            target.request("/generate", body)
        except requests.HTTPError as error:
            status.append((error.response.status_code, error.response.text))

    thread = threading.Thread(target=run)
    thread.start()
    beside = ask(target, OTHERS)
    thread.join()
    assert status[0][0] == 500
    assert "no usable logits" in status[0][1]
    assert [a["output_ids"] for a in beside] == [a["output_ids"] for a in ask(target, OTHERS)]


# Counters.


def section(server) -> dict:
    return server.info()["internal_states"][0]


def metrics(server) -> dict[str, float]:
    """Sum over labels of every counter and gauge of SGLang's."""
    found: dict[str, float] = {}
    for line in server.request("/metrics").splitlines():
        if line.startswith("sglang:"):
            name, value = line.split("{")[0], float(line.rsplit(" ", 1)[1])
            found[name] = found.get(name, 0) + value
    return found


def endings(said) -> list[dict]:
    ids, text = said["output_ids"], said["text"]
    return [
        *[{"stop_token_ids": [ids[k]], "ignore_eos": False} for k in range(1, 9)],
        *[{"max_new_tokens": n} for n in (1, 2, 5, 6, 7, 24)],
        {"stop": text[5:7]},
        {"regex": "[ab]{6}", "ignore_eos": False},
        {"regex": "[ab]{6}", "ignore_eos": True},
    ]


def aborted(server, prompt) -> dict:
    """The last event of a stream that is aborted after its third event."""
    body = {
        "rid": "aborted",
        "input_ids": prompt,
        "stream": True,
        "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": 400},
    }
    events = []
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=600) as stream:
        for line in stream.iter_lines():
            event = line.removeprefix(b"data: ")
            if event and event != b"[DONE]":
                events.append(json.loads(event))
                if len(events) == 3:
                    server.abort("aborted")
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    return events[-1]


def prompt_steps(meta) -> int:
    """Each gives a token; a retracted request passes its prompt again."""
    return 1 + meta["num_retractions"]


def check_request_counters(answer, depth) -> None:
    meta = answer["meta_info"]
    assert meta["completion_tokens"] == len(answer["output_ids"])
    steps, drafts = meta.get("spec_verify_ct", 0), meta.get("spec_num_correct_drafts", 0)
    assert meta["completion_tokens"] == prompt_steps(meta) + steps + drafts
    if steps == 0:
        return
    counts = meta["spec_correct_drafts_histogram"]
    assert sum(counts) == steps
    assert sum(k * n for k, n in enumerate(counts)) == drafts
    assert meta["spec_num_proposed_drafts"] == steps * depth
    assert meta["spec_accept_rate"] == drafts / (steps * depth) <= 1
    assert meta["spec_accept_length"] == meta["completion_tokens"] / steps
    verified = meta["completion_tokens"] - prompt_steps(meta)
    assert verified <= meta["spec_cap_length"] * steps <= (depth + 1) * steps


def trace(answer) -> Trace:
    """What `dspark bench` makes of the answer."""
    meta = answer["meta_info"]
    return Trace(
        0.0,
        [Step(0.0, meta["completion_tokens"])],
        0.0,
        answer["output_ids"],
        meta.get("spec_verify_ct"),
        meta.get("spec_correct_drafts_histogram") or [],
    )


@pytest.fixture(params=[1.0, 0.3])
def budget(server, request):
    body = {"server_args": {"dspark_force_budget_frac": request.param}}
    server.request("/set_internal_state", body)
    yield
    server.request("/set_internal_state", {"server_args": {"dspark_force_budget_frac": 1.0}})


def test_counters_of_requests_server_and_bench_agree(server, said, budget):
    """Failed before: drafts behind a stop and steps of finished requests were counted."""
    server.request("/set_internal_state", {"server_args": {"dspark_clear_info_records": True}})
    depth = section(server)["dspark"]["depth"]
    before = metrics(server)
    answers = []
    for rules in endings(said):
        for kind in KINDS:
            answers += ask(server, [TEXT], **forced(kind, said["output_ids"], rules))
    answers += [*ask(server, PROMPTS), aborted(server, TEXT)]
    for answer in answers:
        check_request_counters(answer, depth)
    metas = [answer["meta_info"] for answer in answers]
    steps = sum(meta.get("spec_verify_ct", 0) for meta in metas)
    tokens = sum(meta["completion_tokens"] for meta in metas)
    state = section(server)
    mean = (tokens - len(metas)) / steps
    assert state["dspark"]["verify_steps"] == steps
    assert state["dspark"]["mean_accepted_length"] == pytest.approx(mean)
    assert state["avg_spec_accept_length"] == state["dspark"]["mean_accepted_length"]
    assert accepted_length([trace(answer) for answer in answers]) == pytest.approx(mean)
    after = metrics(server)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["sglang:generation_tokens_total"] == tokens
    assert grown["sglang:spec_verify_calls_total"] == steps
    assert after["sglang:spec_num_draft_tokens"] == depth + 1
    assert after["sglang:spec_num_steps"] == depth


def test_counters_of_retracted_requests(server, said):
    server.request("/set_internal_state", {"server_args": {"dspark_clear_info_records": True}})
    depth = section(server)["dspark"]["depth"]
    metas = []
    for events, kind in enumerate(KINDS * 2, start=1):
        rules = forced(kind, said["output_ids"], {"max_new_tokens": TOKENS})
        answer = interrupted(server, TEXT, events, **rules)
        check_request_counters(answer, depth)
        metas.append(answer["meta_info"])
    assert sum(meta["num_retractions"] for meta in metas) >= 4
    steps = sum(meta["spec_verify_ct"] for meta in metas)
    given = sum(meta["completion_tokens"] - prompt_steps(meta) for meta in metas)
    state = section(server)["dspark"]
    assert state["verify_steps"] == steps
    assert state["mean_accepted_length"] == pytest.approx(given / steps)


def test_the_gauge_and_the_log_line_show_the_last_interval(server, said):
    """One request alone, a line for each step: the last line tells of its last step."""
    rules = forced("oracle", said["output_ids"], {"max_new_tokens": 10})
    meta = ask(server, [TEXT], **rules)[0]["meta_info"]
    assert meta["spec_correct_drafts_histogram"] == [0, 0, 1, 0, 0, 1]  # 6 tokens, then 3
    lines = re.findall(r"accept len: ([0-9.]+)", server.log())
    assert lines[-2:] == ["6.00", "3.00"]
    assert metrics(server)["sglang:spec_accept_length"] == 3


# Retraction and pauses.


def interrupted(server, prompt, events, extra=None, mode="retract", **rules):
    """The last event of a stream during which the server was paused and went on."""
    parameters = {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS} | rules
    body = {"input_ids": prompt, "sampling_params": parameters, "stream": True} | (extra or {})
    last, seen = {}, 0
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=600) as stream:
        for line in stream.iter_lines():
            event = line.removeprefix(b"data: ")
            if not event or event == b"[DONE]":
                continue
            before = len(last.get("output_ids", ()))
            last, seen = json.loads(event), seen + 1
            assert len(last["output_ids"]) > before
            assert len(last["output_ids"]) == last["meta_info"]["completion_tokens"]
            if seen == events:
                server.request("/pause_generation", {"mode": mode})
                server.request("/continue_generation", {})
    return last


PENALTIES = [
    {"frequency_penalty": 0.6},
    {"presence_penalty": 1.1},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("events", [1, 3, 9])
def test_a_retraction_does_not_forget_what_penalties_count(target, server, said, which, events):
    """Failed before: target-only started to count from zero when a request came back."""
    least = {"stop_token_ids": said["output_ids"][:4], "ignore_eos": False, "min_new_tokens": 15}
    rules = [*PENALTIES, least][which]
    truth = ask(target, [TEXT], **rules)[0]
    for one in (target, server):
        answer = interrupted(one, TEXT, events, **rules)
        assert answer["output_ids"] == truth["output_ids"]
        assert answer["meta_info"]["finish_reason"] == truth["meta_info"]["finish_reason"]
        assert answer["meta_info"]["num_retractions"] >= 1


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("events", [1, 4])
def test_a_pause_changes_no_answer(target, server, said, mode, events):
    kinds = [
        {},
        {"regex": "[ab]{12}", "ignore_eos": False},
        {"stop": said["text"][12:14]},
        {"logit_bias": {"7": 3.0}},
    ]
    wish = {"return_logprob": True, "top_logprobs_num": 2}
    for rules in kinds:
        expected = summary(ask(target, [TEXT], wish, **rules)[0])
        for one in (target, server):
            assert summary(interrupted(one, TEXT, events, wish, mode, **rules)) == expected


def test_pauses_in_company_and_between_the_chunks_of_a_prompt(target, server, said):
    """Random moments; every request is answered as on its own."""
    chance = random.Random(11)
    wish = {"return_logprob": True, "top_logprobs_num": 2}
    company = [
        (TEXT, {}),
        (TEXT, {"regex": "[ab]{12}", "ignore_eos": False}),
        (OTHERS[0], {"frequency_penalty": 0.6}),
        (TEXT, {"stop": said["text"][12:14]}),
        (prompt(1500, seed=16), {"max_new_tokens": 6}),
    ]
    alone = [summary(ask(target, [ids], wish, **rules)[0]) for ids, rules in company]
    for one in (target, server, target, server):
        events, mode = chance.randint(1, 8), chance.choice(["retract", "in_place"])
        with ThreadPoolExecutor(len(company)) as threads:
            jobs = [
                threads.submit(interrupted, one, ids, 0 if i else events, wish, mode, **rules)
                for i, (ids, rules) in enumerate(company)
            ]
            assert [summary(job.result()) for job in jobs] == alone, (events, mode)


def test_a_later_turn_continues_behind_the_stop_of_the_one_before(target, server, said):
    """What was accepted behind the stop is no part of the conversation."""
    stop = {"stop_token_ids": [said["output_ids"][3]], "ignore_eos": False}
    stop |= {"custom_params": {"draft": "oracle", "continuation": said["output_ids"]}}
    turns = []
    for one in (target, server):
        session = one.request("/open_session", {"capacity_of_str_len": 10_000})
        turn = {"session_params": {"id": session, "rid": None}}
        first = ask(one, [TEXT], turn, **stop)[0]
        turn["session_params"]["rid"] = first["meta_info"]["id"]
        turns.append((first["output_ids"], ask(one, [OTHERS[0]], turn)[0]["output_ids"]))
        one.request("/close_session", {"session_id": session})
    assert turns[0] == turns[1]
    first, second = turns[0]
    assert first == said["output_ids"][: len(first)]
    whole = TEXT + first + OTHERS[0]
    assert second == ask(target, [whole])[0]["output_ids"]


def test_a_request_aborted_while_it_is_paused_shows_all_its_ids(target, server):
    """Failed before: the last event held one id and said there were more."""
    for one in (target, server):
        body = {
            "rid": "paused",
            "input_ids": TEXT,
            "stream": True,
            "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": 400},
        }
        events = []
        with requests.post(f"{one.url}/generate", json=body, stream=True, timeout=600) as stream:
            for line in stream.iter_lines():
                event = line.removeprefix(b"data: ")
                if not event or event == b"[DONE]":
                    continue
                events.append(json.loads(event))
                if len(events) == 3:
                    one.request("/pause_generation", {"mode": "retract"})
                    one.abort("paused")
        one.request("/continue_generation", {})
        last = events[-1]
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(last["output_ids"]) == last["meta_info"]["completion_tokens"] >= 3
        assert (
            last["output_ids"]
            == ask(one, [TEXT], max_new_tokens=len(last["output_ids"]))[0]["output_ids"]
        )


def test_nothing_went_wrong_on_the_way(target, server):
    assert "Traceback" not in target.log()
    assert "Traceback" not in server.log()
