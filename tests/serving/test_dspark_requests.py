"""What requests may ask for besides greedy tokens: stops, penalties, grammars, log probabilities,
sampling. The speculating server answers as the target-only one does, position by position."""

import json
import threading

import pytest
import requests
from serving.test_dspark_identity import FORCED, PROMPTS, SPECULATE, TARGET
from serving.test_target_only import ids

TOKENS = 24
FOUR = PROMPTS[:4]


@pytest.fixture(scope="module")
def target(serving):
    return serving(TARGET)


@pytest.fixture(scope="module")
def server(serving):
    return serving(SPECULATE, FORCED)


@pytest.fixture(scope="module")
def truth(target):
    return ids(target.generate_batch(FOUR, TOKENS))


def ask(server, prompts, extra=None, **sampling):
    """The raw answers of one batch."""
    parameters = {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS} | sampling
    body = {"input_ids": prompts, "sampling_params": parameters} | (extra or {})
    return server.request("/generate", body)


def finish(answers):
    return [(a["output_ids"], a["meta_info"]["finish_reason"]) for a in answers]


@pytest.mark.parametrize(
    "penalty",
    [
        {"frequency_penalty": 0.7},
        {"presence_penalty": 1.3},
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 0.7},
        {"logit_bias": {"7": 6.0, "9": -6.0}},
    ],
)
def test_penalties_and_bias(target, server, penalty):
    assert finish(ask(server, FOUR, **penalty)) == finish(ask(target, FOUR, **penalty))


@pytest.mark.parametrize("offset", range(7))
def test_stop_token_at_every_offset_of_a_block(target, server, truth, offset):
    stop = {"stop_token_ids": [truth[0][offset]], "ignore_eos": False}
    ours = server.request(
        "/generate",
        {
            "input_ids": FOUR[0],
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": TOKENS,
                "custom_params": {"draft": "oracle", "continuation": truth[0]},
                **stop,
            },
        },
    )
    assert finish([ours]) == finish(ask(target, FOUR[:1], **stop))
    assert len(ours["output_ids"]) <= offset + 1


def test_min_new_tokens_holds_stops_back(target, server, truth):
    settings = {"stop_token_ids": truth[0][3:6], "ignore_eos": False, "min_new_tokens": 12}
    ours = finish(ask(server, FOUR, **settings))
    assert ours == finish(ask(target, FOUR, **settings))
    assert len(ours[0][0]) >= 12


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7, 12])
def test_max_new_tokens_is_exact(server, truth, limit):
    answers = ask(server, FOUR, max_new_tokens=limit)
    assert [a["output_ids"] for a in answers] == [out[:limit] for out in truth]
    assert all(a["meta_info"]["completion_tokens"] == limit for a in answers)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("start", [2, 5])
def test_stop_strings(target, server, length, start):
    """Cut out of the text the target writes, at different offsets of a block."""
    text = ask(target, FOUR[1:2])[0]["text"]
    stop = {"stop": text[start : start + length]}
    ours, theirs = ask(server, FOUR[1:2], **stop), ask(target, FOUR[1:2], **stop)
    assert ours[0]["text"] == theirs[0]["text"]
    assert finish(ours) == finish(theirs)


def test_nothing_behind_a_stop_string_is_streamed(target, server):
    text = ask(target, FOUR[1:2])[0]["text"]
    stop = {"stop": text[4:7]}
    events = [event.text for event in server.stream(FOUR[1], TOKENS, **stop)]
    assert events[-1] == ask(target, FOUR[1:2], **stop)[0]["text"]
    assert all(events[-1].startswith(event) for event in events)


def test_log_probabilities_are_the_targets(target, server):
    wish = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 6]}
    wish["logprob_start_len"] = 0
    ours, theirs = ask(server, FOUR, wish), ask(target, FOUR, wish)
    for name in (
        "output_token_logprobs",
        "output_top_logprobs",
        "output_token_ids_logprobs",
        "input_token_logprobs",
    ):
        found = [a["meta_info"][name] for a in ours]
        assert found == [a["meta_info"][name] for a in theirs], name
        assert all(found)


def test_scoring_a_prompt_without_generating(target, server):
    wish = {"return_logprob": True, "logprob_start_len": 0}
    ours = ask(server, FOUR, wish, max_new_tokens=0)
    theirs = ask(target, FOUR, wish, max_new_tokens=0)
    scores = [a["meta_info"]["input_token_logprobs"] for a in ours]
    assert scores == [a["meta_info"]["input_token_logprobs"] for a in theirs]
    assert [len(s) for s in scores] == [len(p) for p in FOUR]


def test_hidden_states_are_refused_in_one_sentence(server):
    with pytest.raises(requests.HTTPError) as error:
        ask(server, FOUR[:1], {"return_hidden_states": True})
    assert error.value.response.status_code == 400
    assert "DSpark returns no hidden states" in error.value.response.text


GRAMMARS = [
    {"regex": "[ab]{12}"},
    {"json_schema": json.dumps({"enum": ["red", "green"]})},
    {"ebnf": 'root ::= "x" ("y" | "z")*'},
]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=["regex", "json", "ebnf"])
def test_grammars(target, server, grammar):
    ours = ask(server, FOUR[:2], ignore_eos=False, **grammar)
    assert finish(ours) == finish(ask(target, FOUR[:2], ignore_eos=False, **grammar))


@pytest.mark.parametrize("share", [0.001, 1.0])
def test_grammar_beside_unconstrained_requests(target, server, truth, share):
    """Forced drafts that the grammar forbids and ones it allows, with and without a budget."""
    right = ask(target, FOUR[1:2], ignore_eos=False, regex="[ab]{12}")[0]["output_ids"]
    server.request("/set_internal_state", {"server_args": {"dspark_force_budget_frac": share}})
    plain = {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS}
    bound = {"temperature": 0, "max_new_tokens": TOKENS, "regex": "[ab]{12}"}
    for kind in ("oracle", "wrong@2"):
        wish = {"custom_params": {"draft": kind, "continuation": right}}
        body = {"input_ids": FOUR[:3], "sampling_params": [plain, bound | wish, plain]}
        outputs = [a["output_ids"] for a in server.request("/generate", body)]
        assert outputs == [truth[0], right, truth[2]]
    server.request("/set_internal_state", {"server_args": {"dspark_force_budget_frac": 1.0}})


SAMPLED = [
    {"temperature": 3.0},
    {"temperature": 3.0, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("setting", SAMPLED, ids=["plain", "cut"])
def test_a_seed_pins_a_request_alone_and_in_company(server, setting):
    alone = ask(server, FOUR[:1], sampling_seed=7, **setting)[0]["output_ids"]
    again = ask(server, FOUR[:1], sampling_seed=7, **setting)[0]["output_ids"]
    body = {
        "input_ids": [FOUR[3], FOUR[0], FOUR[2]],
        "sampling_params": [
            {"temperature": 2.0, "ignore_eos": True, "max_new_tokens": TOKENS},
            {"ignore_eos": True, "max_new_tokens": TOKENS, "sampling_seed": 7} | setting,
            {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS},
        ],
    }
    company = server.request("/generate", body)[1]["output_ids"]
    other = ask(server, FOUR[:1], sampling_seed=8, **setting)[0]["output_ids"]
    assert alone == again == company
    assert other != alone


def test_requests_of_every_kind_in_one_batch(target, server, truth):
    plain = {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS}
    eight = [*FOUR, *FOUR]
    kinds = [
        plain,
        plain | {"temperature": 2.0},
        plain | {"frequency_penalty": 0.7},
        plain | {"regex": "[ab]{12}", "ignore_eos": False},
        plain | {"temperature": 2.0, "sampling_seed": 5, "top_k": 9},
        plain | {"logit_bias": {"7": 6.0}},
        plain | {"repetition_penalty": 1.5},
        plain,
    ]
    scored = {"return_logprob": [False] * 7 + [True]}
    both = server.request("/generate", {"input_ids": eight, "sampling_params": kinds} | scored)
    single = {i: ask(target, [eight[i]], **kinds[i])[0]["output_ids"] for i in (2, 3, 5, 6)}
    assert both[0]["output_ids"] == truth[0]
    assert both[7]["output_ids"] == truth[3]
    for i, expected in single.items():
        assert both[i]["output_ids"] == expected, i
    seeded = ask(server, [eight[4]], **kinds[4])[0]["output_ids"]
    assert both[4]["output_ids"] == seeded
    assert set(both[3]["text"]) <= {"a", "b"}
    # SGLang computes them by another formula beside sampled requests, hence not bit for bit.
    scores = ask(target, [eight[7]], {"return_logprob": True})[0]["meta_info"]
    expected = [value for value, *_ in scores["output_token_logprobs"]]
    found = [value for value, *_ in both[7]["meta_info"]["output_token_logprobs"]]
    assert found == pytest.approx(expected, abs=1e-5)
    assert "output_token_logprobs" not in both[0]["meta_info"]


POISON = """
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

class Poison(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for row, wish in zip(logits, custom_param_list):
            if wish and len(wish["__req__"].output_ids) >= 3:
                row.fill_(float("nan"))
        return logits
"""


def poison() -> str:
    """A processor that writes NaN from the fourth token on; sent by value, as source would be."""
    namespace = {"__name__": "__main__"}
    exec(POISON, namespace)
    return namespace["Poison"].to_str()


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_request_without_usable_logits_fails_alone(server, truth, temperature):
    results = {}
    poisoned = {"temperature": temperature, "custom_params": {"poison": 1}}

    def run(name, index, extra):
        body = {
            "input_ids": FOUR[index],
            "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS}
            | extra,
        }
        if extra:
            body["custom_logit_processor"] = poison()
        try:
            results[name] = server.request("/generate", body)["output_ids"]
        except requests.HTTPError as error:
            results[name] = error.response.status_code

    threads = [
        threading.Thread(target=run, args=("a", 0, {})),
        threading.Thread(target=run, args=("b", 1, poisoned)),
        threading.Thread(target=run, args=("c", 2, {})),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"a": truth[0], "b": 500, "c": truth[2]}
    assert server.generate(FOUR[3], TOKENS).ids == truth[3]


def test_streamed_tokens_add_up(target, server):
    """Steps emit several tokens at once; every event counts exactly what it has sent so far."""
    events = list(server.stream(FOUR[2], TOKENS))
    lengths = [len(event.ids) for event in events]
    assert lengths == sorted(set(lengths))
    assert [event.meta["completion_tokens"] for event in events] == lengths
    assert events[-1].ids == target.generate(FOUR[2], TOKENS).ids


def test_nothing_went_wrong_on_the_way(server):
    assert "Traceback" not in server.log()
