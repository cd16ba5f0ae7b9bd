"""Control calls in every state of a server: what is not served says so, and nobody is disturbed."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from answers import ANSWERS
from serving.prompts import prompt
from serving.test_dspark_identity import FORCED, SPECULATE, TARGET
from serving.test_target_only import wait_idle

from dspark.host.control import NOT_SERVED

TOKENS = 60
PROMPTS = [prompt(40, seed=1), prompt(130, seed=2)]
MODES = {"target-only": (TARGET, ()), "dspark": (SPECULATE, FORCED)}
GROUP = {"master_address": "127.0.0.1", "master_port": 1, "group_name": "g", "world_size": 1}
REMOTE = {"master_address": "127.0.0.1", "ports": "1"}
# Path, body and the word that says why. Each is a way to one method of NOT_SERVED.
REFUSED = {
    "update_weights_from_disk": ("/update_weights_from_disk", {"model_path": "x"}, "weights"),
    "update_weights_from_tensor": (
        "/update_weights_from_tensor",
        {"serialized_named_tensors": ["AAAA"]},
        "weights",
    ),
    "update_weights_from_distributed": (
        "/update_weights_from_distributed",
        {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]},
        "weights",
    ),
    "update_weights_from_ipc": ("/update_weights_from_ipc", {"zmq_handles": {}}, "weights"),
    "init_weights_update_group": (
        "/init_weights_update_group",
        GROUP | {"rank_offset": 0},
        "weights",
    ),
    "destroy_weights_update_group": (
        "/destroy_weights_update_group",
        {"group_name": "g"},
        "weights",
    ),
    "init_weights_send_group_for_remote_instance": (
        "/init_weights_send_group_for_remote_instance",
        REMOTE | {"group_rank": 0, "world_size": 1},
        "weights",
    ),
    "send_weights_to_remote_instance": ("/send_weights_to_remote_instance", REMOTE, "weights"),
    "get_weights_by_name": ("/get_weights_by_name", {"name": "lm_head.weight"}, "weights"),
    "check_weights": ("/weights_checker", {}, "weights"),
    "release_memory_occupation": ("/release_memory_occupation", {"tags": ["weights"]}, "memory"),
    "resume_memory_occupation": ("/resume_memory_occupation", {}, "memory"),
    "load_lora_adapter": ("/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}, "LoRA"),
    "load_lora_adapter_from_tensors": (
        "/load_lora_adapter_from_tensors",
        {"lora_name": "a", "config_dict": {}, "serialized_named_tensors": ["AAAA"]},
        "LoRA",
    ),
    "unload_lora_adapter": ("/unload_lora_adapter", {"lora_name": "a"}, "LoRA"),
    "start_expert_distribution_record": ("/start_expert_distribution_record", {}, "experts"),
    "stop_expert_distribution_record": ("/stop_expert_distribution_record", {}, "experts"),
    "dump_expert_distribution_record": ("/dump_expert_distribution_record", {}, "experts"),
    "clear_hicache_storage": ("/clear_hicache_storage_backend", {}, "host tier"),
    "add_external_corpus": ("/add_external_corpus", {"documents": ["a"]}, "n-grams"),
    "remove_external_corpus": ("/remove_external_corpus", {"corpus_id": "a"}, "n-grams"),
    "list_external_corpora": ("/list_external_corpora", None, "n-grams"),
}
NEEDS_ADMIN_KEY = {"attach_hicache_storage", "detach_hicache_storage"}
# What is served, asked for wrongly.
WRONG = {
    "pause": ("/pause_generation", {"mode": "foo"}, "mode"),
    "setting": ("/set_internal_state", {"server_args": {"max_running_requests": 4}}, "cannot"),
    "threshold": (
        "/set_internal_state",
        {"server_args": {"speculative_accept_threshold_single": 0.5}},
        "cannot",
    ),
    "half a request": (
        "/set_internal_state",
        {"server_args": {"pp_max_micro_batch_size": 1.5}},
        "whole number",
    ),
    "delay": ("/slow_down", {"forward_sleep_time": 1e9}, "forward_sleep_time"),
    "stages": ("/start_profile", {"profile_by_stage": True}, "profile_by_stage"),
    "memory profile": ("/start_profile", {"activities": ["MEM"]}, "activities"),
    "no steps": ("/start_profile", {"num_steps": 0}, "num_steps"),
    "no directory": ("/start_profile", {"output_dir": "/dev/null/profile"}, "output_dir"),
    "no profile": ("/stop_profile", {}, "not in progress"),
}


def call(server, path, body) -> requests.Response:
    if body is None:
        return requests.get(server.url + path, timeout=60)
    return requests.post(server.url + path, json=body, timeout=60)


def assert_refused(server) -> None:
    for path, body, word in [*REFUSED.values(), *WRONG.values()]:
        answer = call(server, path, body)
        assert answer.status_code == 400, (path, answer.text)
        assert word in answer.text, (path, answer.text)


@pytest.fixture(scope="module")
def alone(serving):
    """What each prompt gives on its own."""
    return [serving(TARGET).generate(p, TOKENS).ids for p in PROMPTS]


@pytest.fixture(scope="module", params=MODES)
def server(request, serving, alone):
    flags, env = MODES[request.param]
    return serving(flags, env)


@pytest.fixture
def quiet(server):
    """The server, whose log gains no traceback and whose pools are empty at the end."""
    before = server.log().count("Traceback")
    yield server
    wait_idle(server)
    assert server.log().count("Traceback") == before


class Stream:
    """A request that is read event by event, in a thread of its own."""

    def __init__(
        self,
        server,
        tokens: list[int],
        name: str = "",
        length: int = TOKENS,
        sampling: dict | None = None,
        **extra,
    ):
        self.events: list[dict] = []
        greedy = {"temperature": 0, "ignore_eos": True, "max_new_tokens": length}
        self.body = extra | {
            "input_ids": tokens,
            "stream": True,
            "sampling_params": greedy | (sampling or {}),
        }
        if name:
            self.body["rid"] = name
        self.url = f"{server.url}/generate"
        self.moved = threading.Condition()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        with requests.post(self.url, json=self.body, stream=True, timeout=300) as response:
            for line in response.iter_lines():
                event = line.removeprefix(b"data: ")
                if event and event != b"[DONE]":
                    with self.moved:
                        self.events.append(json.loads(event))
                        self.moved.notify_all()

    def wait_for(self, events: int) -> None:
        with self.moved:
            assert self.moved.wait_for(lambda: len(self.events) >= events, timeout=120)

    def finish(self) -> dict:
        self.thread.join(300)
        assert not self.thread.is_alive()
        return self.events[-1]


def test_every_method_that_is_not_served_has_its_way_here():
    assert set(REFUSED) | NEEDS_ADMIN_KEY == set(NOT_SERVED)


def test_refused_while_idle(quiet, alone):
    assert_refused(quiet)
    assert [quiet.generate(p, TOKENS).ids for p in PROMPTS] == alone


def test_refused_while_requests_run(quiet, alone):
    streams = [Stream(quiet, p) for p in PROMPTS]
    for stream in streams:
        stream.wait_for(1)
    assert_refused(quiet)
    assert [stream.finish()["output_ids"] for stream in streams] == alone


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("events", [4, *(pytest.param(n, marks=pytest.mark.deep) for n in (1, 9))])
def test_a_pause_keeps_every_token(quiet, alone, mode, events):
    """Also for a request that comes while the server is paused, and for one between its chunks."""
    streams = [Stream(quiet, p, return_logprob=True) for p in PROMPTS]
    for stream in streams:
        stream.wait_for(events)
    long = Stream(quiet, prompt(2000, seed=5), length=3)
    pause = {"mode": mode}
    for _ in range(2):  # twice is as once
        assert call(quiet, "/pause_generation", pause).ok
    assert_refused(quiet)
    assert call(quiet, "/server_info", None).ok
    assert call(quiet, "/flush_cache", {}).status_code == 400, "requests are waiting"
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(quiet.generate, PROMPTS[0], TOKENS)
        assert call(quiet, "/continue_generation", {}).ok
        assert late.result().ids == alone[0]
    for stream, ids in zip(streams, alone, strict=True):
        last = stream.finish()
        assert last["output_ids"] == ids
        assert len(last["meta_info"]["output_token_logprobs"]) == len(ids)
        lengths = [len(event["output_ids"]) for event in stream.events]
        assert lengths == sorted(set(lengths)), "no event repeats another"
    assert len(long.finish()["output_ids"]) == 3
    assert call(quiet, "/continue_generation", {}).ok, "without a pause it changes nothing"


LONG = prompt(2000, seed=5)  # eight chunks
COMPANY = 200  # tokens of each request beside it
WISHES = {  # further fields of each
    "grammar": {"sampling": {"regex": "[ab]{150}", "ignore_eos": False}},
    "penalties": {"sampling": {"frequency_penalty": 0.6, "repetition_penalty": 1.3}},
    "log probabilities": {"return_logprob": True},
    "stop string": {},  # see `stopped`
}


def told(event: dict) -> tuple:
    """What a pause must not change of an answer."""
    meta = event["meta_info"]
    logprobs = len(meta.get("output_token_logprobs", ()))
    return event["output_ids"], event["text"], meta["finish_reason"], logprobs


@pytest.fixture(scope="module")
def company(serving):
    """Fields of the requests beside the long one, and what each is told alone, target-only."""
    server = serving(TARGET)
    text = server.generate(prompt(43, seed=13), COMPANY).text
    stop = {"sampling": {"stop": [text[len(text) // 2 :][:4]]}}
    fields = [
        {"tokens": prompt(40 + i, seed=10 + i), "length": COMPANY} | (wish or stop)
        for i, wish in enumerate(WISHES.values())
    ]
    return fields, [told(Stream(server, **each).finish()) for each in fields]


@pytest.mark.deep
@pytest.mark.parametrize("turn", range(20))
def test_pauses_anywhere_in_company(quiet, serving, company, turn):
    """Between blocks and chunks, with a grammar, penalties, log probabilities and a stop string."""
    rng = random.Random(turn)
    fields, right = company
    expected = serving(TARGET).generate(LONG, 3).ids
    quiet.flush_cache()
    streams = [Stream(quiet, **each) for each in fields]
    streams[2].wait_for(rng.randint(1, 20))
    long = Stream(quiet, LONG, length=3)
    assert call(quiet, "/pause_generation", {"mode": rng.choice(["in_place", "retract"])}).ok
    assert call(quiet, "/flush_cache", {}).status_code == 400, "requests are waiting"
    assert call(quiet, "/server_info", None).ok
    assert call(quiet, "/v1/loads", None).ok
    late = Stream(quiet, **fields[1])
    assert call(quiet, "/continue_generation", {}).ok
    assert [told(stream.finish()) for stream in [*streams, late]] == [*right, right[1]]
    assert long.finish()["output_ids"] == expected
    for stream in [*streams, late]:
        lengths = [len(event["output_ids"]) for event in stream.events]
        assert lengths == sorted(lengths)


def test_pausing_an_idle_server(quiet, alone):
    for mode in ("in_place", "retract", "abort"):
        assert call(quiet, "/pause_generation", {"mode": mode}).ok
        assert call(quiet, "/continue_generation", {}).ok
    assert quiet.generate(PROMPTS[0], TOKENS).ids == alone[0]


@pytest.mark.deep
def test_a_name_is_free_again_when_its_stream_has_ended(quiet, alone):
    """SGLang aborts whoever bears the name of a stream two seconds after it ended."""
    assert Stream(quiet, PROMPTS[0], name="again", length=4).finish()["output_ids"] == alone[0][:4]
    last = Stream(quiet, PROMPTS[0], name="again", length=2000).finish()
    assert last["meta_info"]["finish_reason"]["type"] == "length"
    assert last["output_ids"][:TOKENS] == alone[0]


@pytest.mark.deep
@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_request_aborted_while_paused_says_all_its_ids(quiet, alone, mode, turn):
    """Under the same name each time: an earlier stream's end is none of its business."""
    gone = Stream(quiet, PROMPTS[0], name="gone")
    stays = Stream(quiet, PROMPTS[1])
    gone.wait_for(3)
    stays.wait_for(1)
    assert call(quiet, "/pause_generation", {"mode": mode}).ok
    assert call(quiet, "/abort_request", {"rid": "gone"}).ok
    assert call(quiet, "/continue_generation", {}).ok
    last = gone.finish()
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    ids = last["output_ids"]
    assert len(ids) == last["meta_info"]["completion_tokens"] < TOKENS
    assert ids == alone[0][: len(ids)]
    lengths = [len(event["output_ids"]) for event in gone.events]
    assert lengths == sorted(lengths)
    assert stays.finish()["output_ids"] == alone[1]


@pytest.mark.parametrize("before", ["", "in_place", "retract"])
def test_pausing_by_abort_ends_what_runs(quiet, alone, before):
    """Also behind another pause, during which nothing moves."""
    stream = Stream(quiet, PROMPTS[0], length=2000)
    stream.wait_for(2)
    if before:
        assert call(quiet, "/pause_generation", {"mode": before}).ok
    assert call(quiet, "/pause_generation", {"mode": "abort"}).ok
    last = stream.finish()
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["output_ids"][:TOKENS] == alone[0][: len(last["output_ids"])]
    assert call(quiet, "/continue_generation", {}).ok
    assert quiet.generate(PROMPTS[1], TOKENS).ids == alone[1]


def test_log_probabilities_of_tokens_that_one_of_two_asks_for(quiet, alone):
    """SGLang's scheduler ends at the step that holds both."""
    streams = [
        Stream(quiet, PROMPTS[0], return_logprob=True, token_ids_logprob=[5, 6]),
        Stream(quiet, PROMPTS[1], return_logprob=True),
    ]
    for stream, ids in zip(streams, alone, strict=True):
        assert stream.finish()["output_ids"] == ids
    asked = streams[0].events[-1]["meta_info"]["output_token_ids_logprobs"]
    assert [[token for _, token, _ in entry] for entry in asked] == [[5, 6]] * TOKENS


def test_scoring_beside_a_request(quiet, alone):
    stream = Stream(quiet, PROMPTS[0])
    stream.wait_for(2)
    body = {"model": "m", "query": [7, 8], "items": [[9], [10, 11]], "label_token_ids": [5, 6]}
    answer = call(quiet, "/v1/score", body)
    assert answer.ok, answer.text
    assert [len(scores) for scores in answer.json()["scores"]] == [2, 2]
    assert stream.finish()["output_ids"] == alone[0]


def test_texts_are_taken_apart_by_our_parsers(quiet):
    body = {"text": ANSWERS["start and end"], "reasoning_parser": "deepseek-v4"}
    answer = call(quiet, "/separate_reasoning", body).json()
    assert (answer["reasoning_text"], answer["text"]) == ("abc def", "normal text")
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    body = {"text": ANSWERS["one call"], "tools": [tool], "tool_call_parser": "deepseekv4"}
    answer = call(quiet, "/parse_function_call", body).json()
    assert answer["normal_text"] == "I look it up."
    assert [each["name"] for each in answer["calls"]] == ["weather"]


def test_a_profile_is_taken_once(quiet, alone, tmp_path):
    start = {"output_dir": str(tmp_path), "activities": ["CPU"], "with_stack": False}
    assert call(quiet, "/start_profile", start).ok
    again = call(quiet, "/start_profile", start)
    assert (again.status_code, "already in progress" in again.text) == (400, True)
    assert quiet.generate(PROMPTS[0], 4).ids == alone[0][:4]
    assert call(quiet, "/stop_profile", {}).ok
    assert list(tmp_path.iterdir())
    assert quiet.generate(PROMPTS[0], TOKENS).ids == alone[0]


def test_sessions(quiet, alone):
    """A turn of a session continues the one before it, as its tokens given in full would."""
    name = call(quiet, "/open_session", {"capacity_of_str_len": 10_000}).json()
    first = turn(quiet, name, PROMPTS[0], None)
    assert first["output_ids"] == alone[0][:12]
    second = turn(quiet, name, PROMPTS[1], first["meta_info"]["id"])
    whole = PROMPTS[0] + alone[0][:12] + PROMPTS[1]
    assert second["output_ids"] == quiet.generate(whole, 12).ids
    assert call(quiet, "/close_session", {"session_id": name}).ok
    with pytest.raises(requests.HTTPError):
        turn(quiet, name, PROMPTS[0], None)


def turn(server, session: str, tokens: list[int], rid: str | None) -> dict:
    body = {
        "input_ids": tokens,
        "session_params": {"id": session, "rid": rid},
        "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": 12},
    }
    return server.request("/generate", body)
