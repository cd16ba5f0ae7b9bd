"""A run of accepted tokens ends a request where single tokens would have ended it."""

from array import array

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from dspark.host.finish import update_finish_state

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


def request(limit, tokenizer=None, vocab=VOCAB, **settings):
    tokenizer = tokenizer or Letters()
    params = SamplingParams(max_new_tokens=limit, **settings)
    params.normalize(tokenizer)
    req = Req("rid", "", array("q", [5, 6]), params, vocab_size=vocab, eos_token_ids={EOS})
    req.tokenizer = tokenizer
    return req


def feed(req, tokens, run):
    """Emit `tokens` in runs of `run`; returns what the client sees."""
    for start in range(0, len(tokens), run):
        new = tokens[start : start + run]
        req.output_ids.extend(new)
        req.update_reasoning_tokens(new, THINK_END)  # SGLang counts before it looks for the end
        update_finish_state(Req.update_finish_state, req, len(new))
        if req.finished():
            break
    return list(req.output_ids_through_stop), req.finished_reason.to_json()


TEXT = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]


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
        update_finish_state(Req.update_finish_state, req, 6)
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
    req = request(20)
    req.output_ids.extend([10, 11, -1])
    update_finish_state(Req.update_finish_state, req, 3)
    assert isinstance(req.finished_reason, FINISH_ABORT)
    assert req.finished_reason.status_code == 500
    assert list(req.output_ids) == [10, 11]


def test_an_abort_that_is_pending_is_left_to_sglang():
    req = request(20)
    req.to_finish = FINISH_ABORT("client left")
    req.output_ids.extend([EOS])
    update_finish_state(Req.update_finish_state, req, 1)
    assert req.finished_reason.message == "client left"


def test_the_limit_is_restored_when_the_test_fails():
    req = request(2)
    req.output_ids.extend(TEXT[:4])

    def fail(*_):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        update_finish_state(fail, req, 4)
    assert req.sampling_params.max_new_tokens == 2
    assert list(req.output_ids) == TEXT[:4]
