"""What may be sent of a text whose end is not complete."""

import functools
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers import detokenizer_manager
from sglang.srt.managers.detokenizer_manager import DetokenizerManager

from dspark.host import answer_hooks, detokenizer

BOS, EOS = 256, 257  # behind the bytes


class Bytes:
    """A tokenizer with a token for each byte, and two special ones."""

    is_fast = True

    def batch_decode(self, rows, skip_special_tokens, spaces_between_special_tokens):
        special = {BOS: b"<bos>", EOS: b"<eos>"}
        skipped = special.keys() if skip_special_tokens else ()
        return [
            b"".join(special.get(t) or bytes([t]) for t in row if t not in skipped).decode(
                errors="replace"
            )
            for row in rows
        ]


def events(runs: list[list[int]], skip: bool = True, matched: str | int | None = None) -> list[str]:
    """What the detokenizer sends for an answer that comes in `runs` of tokens; the last ends it."""
    manager = object.__new__(DetokenizerManager)
    manager.tokenizer, manager.vocab_size = Bytes(), 258
    manager.decode_status = {}
    manager.disable_tokenizer_batch_decode = manager.is_tool_call_parser_gpt_oss = False
    sent = []
    for number, run in enumerate(runs):
        last = number == len(runs) - 1
        step = SimpleNamespace(
            rids=["a"],
            decoded_texts=[""],
            decode_ids=[run],
            read_offsets=[0],
            finished_reasons=[{"matched": matched} if last else None],
            no_stop_trim=[False],
            skip_special_tokens=[skip],
            spaces_between_special_tokens=[True],
        )
        sent += manager._decode_batch_token_id_output(step)
    return sent


@pytest.fixture
def ours(monkeypatch):
    monkeypatch.setattr(detokenizer_manager, "find_printable_text", detokenizer.settled)


def cut(ids: list[int], places: set[int]) -> list[list[int]]:
    ends = [0, *sorted(p for p in places if 0 < p < len(ids)), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(ends)]


def test_a_text_is_not_sent_twice(ours):
    ids = list("你好，我在".encode())
    assert events([ids[:7], ids[7:10], ids[10:]]) == ["你好", "，", "我在"]


TOKENS = st.one_of(
    st.text(alphabet="a b\n好，é🌧️\u200d😀\ufffd", max_size=6).map(lambda t: list(t.encode())),
    st.lists(st.integers(0, 257), max_size=4),
)


@given(st.lists(TOKENS, max_size=6), st.sets(st.integers(1, 40)), st.booleans())
def test_every_cut_of_any_bytes_gives_the_text_of_all(parts, places, skip):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detokenizer_manager, "find_printable_text", detokenizer.settled)
        ids = list(itertools.chain.from_iterable(parts))
        (text,) = Bytes().batch_decode([ids], skip, True)
        sent = events(cut(ids, places), skip)
        assert "".join(sent) == text
        for n in range(len(sent)):
            assert text.startswith("".join(sent[:n]))


def test_a_stop_token_inside_a_character_ends_with_what_was_not_complete(ours):
    ids = list("好🌧".encode())
    assert events([ids[:5], ids[5:6]], matched=ids[5]) == ["好", "\ufffd"]


def test_only_our_model_has_a_detokenizer_of_its_own(monkeypatch):
    def launched(is_ours: bool):
        monkeypatch.setattr(answer_hooks.arguments, "is_deepseek_v4", lambda _: is_ours)
        given = answer_hooks.launch_detokenizer(
            lambda _, **given: given, None, "arguments", "ports", print
        )
        assert (given["server_args"], given["port_args"]) == ("arguments", "ports")
        return given["run_detokenizer_process_func"]

    assert launched(False) is print
    ours = launched(True)
    assert isinstance(ours, functools.partial)
    assert (ours.func, ours.args) == (detokenizer.run, (print,))


def test_the_process_reads_by_our_rule(monkeypatch):
    stock = detokenizer_manager.find_printable_text
    monkeypatch.setattr(detokenizer_manager, "find_printable_text", stock)  # put back at the end
    filtered = []
    monkeypatch.setattr(detokenizer.start_log, "leave_out_what_is_untrue", filtered.append)
    seen = []

    def original(*given):
        seen.append((*given, detokenizer_manager.find_printable_text("好，\ufffd")))

    detokenizer.run(original, "arguments", "ports")
    assert seen == [("arguments", "ports", "好，")]
    assert [is_ours() for is_ours in filtered] == [True]
