"""A run of accepted tokens ends a request where single tokens would have ended it."""

from array import array

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from dspark.host.finish import take, update_finish_state
from dspark.speculation.sampling import BROKEN

EOS, STOP, VOCAB = 1, 50, 100
THINK_END = [60, 61]


class Bytes:
    """A tokenizer whose token i is the byte i: characters beyond ASCII take several tokens."""

    eos_token_id = EOS
    additional_stop_token_ids = None

    def decode(self, ids, **_):
        return bytes(list(ids)).decode(errors="replace")

    def encode(self, text, **_):
        return list(text.encode())


class Letters:
    """A tokenizer whose token i is the letter chr(97 + i % 26)."""

    eos_token_id = EOS
    additional_stop_token_ids = None

    def decode(self, ids, **_):
        return "".join(chr(97 + i % 26) for i in ids)

    def encode(self, text, **_):
        return [ord(c) - 97 for c in text]


def request(limit, tokenizer=None, vocab=VOCAB, ends=(EOS,), **settings):
    tokenizer = tokenizer or Letters()
    params = SamplingParams(max_new_tokens=limit, **settings)
    params.normalize(tokenizer)
    req = Req("rid", "", array("q", [5, 6]), params, vocab_size=vocab, eos_token_ids=set(ends))
    req.tokenizer = tokenizer
    return req


def emit(req, run):
    """One step of the speculating server, in SGLang's order of calls."""
    new = take(req, run)
    req.output_ids.extend(new)
    req.update_reasoning_tokens(new, THINK_END)
    update_finish_state(req, grammar_behind=False)


def feed(req, tokens, run):
    """Emit `tokens` in runs of `run`; returns what the client sees."""
    for start in range(0, len(tokens), run):
        emit(req, tokens[start : start + run])
        if req.finished():
            break
    return list(req.output_ids_through_stop), req.finished_reason.to_json()


TEXT = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]


@pytest.mark.parametrize("end", [27, 47])
@pytest.mark.parametrize("place", range(6))
def test_every_end_token_of_a_list_ends_a_request_at_every_offset(end, place):
    """As `eos_token_id: [27, 47]` in config.json; neither is the tokenizer's."""
    run = [*TEXT[:place], end, *TEXT[place:5]]
    assert feed(request(9, ends=(27, 47)), run, 6) == (
        [*TEXT[:place], end],
        {"type": "stop", "matched": end},
    )


@pytest.mark.parametrize("run", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("limit", [4, 5, 6, 7])
@pytest.mark.parametrize("place", range(8))
def test_eos_anywhere_in_a_run_ends_the_request_as_it_would_alone(run, limit, place):
    tokens = [*TEXT[:place], EOS, *TEXT[place:]]
    single = feed(request(limit), tokens, 1)
    assert feed(request(limit), tokens, run) == single
    assert len(single[0]) == min(place + 1, limit)
    assert (single[1]["type"] == "stop") == (place < limit)


@pytest.mark.parametrize("run", [2, 6])
@pytest.mark.parametrize("place", range(7))
def test_stop_tokens_likewise(run, place):
    tokens = [*TEXT[:place], STOP, *TEXT[place:]]
    settings = {"stop_token_ids": [STOP]}
    assert feed(request(6, **settings), tokens, run) == feed(request(6, **settings), tokens, 1)


@pytest.mark.parametrize("run", [2, 4, 6])
@pytest.mark.parametrize("stop", ["k", "lmn", "klmnopqrs", "nop"])
@pytest.mark.parametrize("limit", [3, 5, 6, 20])
def test_stop_strings_at_any_offset_and_across_runs(run, stop, limit):
    settings = {"stop": [stop]}
    tokens = TEXT * 2
    assert feed(request(limit, **settings), tokens, run) == feed(
        request(limit, **settings), tokens, 1
    )


@pytest.mark.parametrize("run", range(2, 7))
@pytest.mark.parametrize("stop", ["ü", "é→", "→", "aé→b"])
@pytest.mark.parametrize("before", range(6))
def test_stop_strings_of_characters_that_take_several_tokens(run, stop, before):
    tokens = list(f"{'x' * before}aé→bü and more".encode())
    outcomes = [feed(request(20, Bytes(), 256, stop=[stop]), tokens, n) for n in (run, 1)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == {"type": "stop", "matched": stop}
    assert bytes(outcomes[0][0]).decode().endswith(stop)


@pytest.mark.parametrize("run", [2, 3, 5, 6])
@pytest.mark.parametrize("thought", range(8))
@pytest.mark.parametrize("answer", range(3))
@pytest.mark.parametrize("limit", [5, 20])
def test_reasoning_is_counted_up_to_the_end_of_the_request(run, thought, answer, limit):
    """The end of the thought and then of the text, both anywhere in a run or in two."""
    tokens = [*TEXT[:thought], *THINK_END, *TEXT[:answer], EOS, *TEXT]
    counts = []
    for width in (run, 1):
        req = request(limit)
        ids, _ = feed(req, tokens, width)
        assert req.reasoning_tokens == min(thought + 2, limit) <= len(ids)
        counts.append((req.reasoning_tokens, len(ids)))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("place", range(6))
def test_a_text_that_ends_within_its_thought_is_all_reasoning(place):
    req = request(20)
    ids, _ = feed(req, [*TEXT[:place], EOS, *TEXT], 6)
    assert req.reasoning_tokens == len(ids) == place + 1


class Counted(array):
    """Output ids that count how many of them are looked at."""

    touched = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.touched += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self):
        self.touched += len(self)
        return super().__iter__()

    def __contains__(self, value):
        self.touched += len(self)
        return super().__contains__(value)


@pytest.mark.parametrize("stop", [None, ["klm!"]])
def test_the_work_of_a_step_does_not_grow_with_the_output(stop):
    touched = []
    for length in (100, 1_000, 10_000):
        req = request(20_000, stop=stop)
        req.output_ids = Counted("q", [7] * length)
        emit(req, TEXT[:6])
        assert not req.finished()
        touched.append(req.output_ids.touched)
    assert touched[0] == touched[1] == touched[2] > 0


def test_ignore_eos_runs_to_the_limit():
    ids, reason = feed(request(5, ignore_eos=True), [EOS, *TEXT], 6)
    assert ids == [EOS, *TEXT[:4]]
    assert reason["type"] == "length"


def test_limit_inside_a_run_without_a_stop():
    ids, reason = feed(request(5), TEXT, 6)
    assert ids == TEXT[:5]
    assert reason == FINISH_LENGTH(5).to_json()


def test_a_token_that_could_not_be_chosen_ends_the_request_with_an_error():
    ids, reason = feed(request(20), [10, 11, BROKEN], 3)
    assert ids == [10, 11]
    assert (reason["type"], reason["status_code"]) == ("abort", 500)
    assert reason["message"] == "the model produced no usable logits for this request"


@pytest.mark.parametrize("end", [{"stop": ["m"]}, {"stop_token_ids": [12]}, {"limit": 3}])
@pytest.mark.parametrize("behind", [1, 2, 3])
def test_a_token_that_could_not_be_chosen_behind_the_end_is_nobodys_error(end, behind):
    """Failed before: the whole request became an error 500."""
    run = [*TEXT[:3], *TEXT[3 : 2 + behind], BROKEN]
    ids, reason = feed(request(**({"limit": 20} | end)), run, 6)
    assert ids == TEXT[:3]
    assert reason["type"] == ("length" if "limit" in end else "stop")


def test_a_broken_token_of_a_prompt_is_not_in_the_output():
    req = request(20)
    req.output_ids.append(BROKEN)
    update_finish_state(req, grammar_behind=True)
    assert req.finished_reason.status_code == 500
    assert list(req.output_ids_through_stop) == []
    assert BROKEN not in req.output_ids


def test_the_stop_string_that_appears_first_wins_not_the_one_listed_first():
    """Failed before: the whole run was searched for the first listed, then for the second."""
    settings = {"stop": ["pq", "mn"]}
    ids, reason = feed(request(20, **settings), TEXT, 8)
    assert (ids, reason["matched"]) == (TEXT[:4], "mn")


def test_a_stop_token_wins_over_a_stop_string_completed_behind_it():
    """Failed before: a string anywhere in the run went before every token."""
    settings = {"stop": ["pq"], "stop_token_ids": [TEXT[2]]}
    assert feed(request(20, **settings), TEXT, 8) == (
        TEXT[:3],
        {"type": "stop", "matched": TEXT[2]},
    )


def test_a_stop_expression_wins_over_a_stop_string_behind_it():
    """Failed before: strings were searched first."""
    settings = {"stop": ["pq"], "stop_regex": ["l[mn]"]}
    ids, reason = feed(request(20, **settings), TEXT, 8)
    assert (ids, reason["matched"]) == (TEXT[:3], "l[mn]")


def test_an_expression_that_cannot_be_evaluated_ends_the_request():
    req = request(20)
    req.sampling_params.stop_regex_strs = ["("]
    emit(req, TEXT[:3])
    assert req.finished_reason.status_code == 400
    assert list(req.output_ids_through_stop) == TEXT[:1]


@pytest.mark.parametrize("token", [EOS, 10])
def test_an_abort_that_is_pending_wins(token):
    req = request(20)
    req.to_finish = FINISH_ABORT("client left")
    emit(req, [token])
    assert req.finished_reason.message == "client left"
    assert list(req.output_ids) == [token]


def test_looking_for_the_end_leaves_nothing_behind():
    req = request(20, stop=["lm"])
    assert take(req, TEXT) == TEXT[:3]
    assert list(req.output_ids) == []
    assert (req.finished_reason, req.finished_len, req.to_finish) == (None, None, None)
