"""The drive of a memory record: the same requests everywhere, a record that survives failures."""

import json

import pytest

from dspark.bench import memory_card
from dspark.bench.memory_card import Request


def work(count, **changed):
    sizes = {"longest": 60, "new_tokens": 6, "vocab": 500, "stops": [3, 4], "seed": 1} | changed
    return memory_card.make_requests(count, **sizes)


def test_a_request_does_not_depend_on_how_many_there_are():
    assert work(10) == work(40)[:10]
    assert work(10) != work(10, seed=2)


def test_requests_cover_what_they_promise():
    some = work(400, longest=6000)
    lengths = [len(r.prompt) for r in some]
    assert min(lengths) == 1
    assert 5000 < max(lengths) <= 6000
    assert {r.sampling["temperature"] for r in some} == {0.0, 0.8}
    assert 60 < sum("stop_token_ids" in r.sampling for r in some) < 140
    assert 15 < sum(r.abort_after is not None for r in some) < 55
    assert all(r.compared == (r.number % 2 == 0 and r.abort_after is None) for r in some)
    assert all(0 <= token < 500 for r in some for token in r.prompt)


def test_growth_is_of_the_samples_after_the_first():
    samples = [{"requests": n, "reserved": n << 20} for n in (25, 100, 125, 150)]
    assert memory_card.growth(samples, 100, "reserved") == 50
    assert memory_card.growth([{"requests": 100}], 100, "reserved") is None


def test_cases_are_compared_by_number():
    record = {
        "cases": {"a": {"ids": {"0": [1], "2": [2], "4": [3]}}, "b": {"ids": {"0": [1], "2": [9]}}}
    }
    assert memory_card.compare(record, "a", "b") == {"compared": 2, "equal": 1, "differing": ["2"]}


def test_parts_are_added_to_what_is_there(tmp_path):
    file = tmp_path / "record.json"
    memory_card.write_part(file, "cases", "a", {"failed": "no"})
    memory_card.write_part(file, "refused", "b", {"status": 1})
    record = json.loads(file.read_text())
    assert record["cases"] == {"a": {"failed": "no"}}
    assert record["refused"] == {"b": {"status": 1}}
    assert "environment" in record


def test_the_plan_is_compared_with_what_torch_reserved():
    planned = {"total": 1000, "reserve": 100}
    memory = {"planned": planned, "measured": {"most_reserved": 900}}
    assert memory_card.planned_against_measured(memory) == pytest.approx(0)
    assert memory_card.planned_against_measured({"planned": planned}) is None


def test_every_sixteenth_token_stops_a_request():
    assert memory_card.stop_tokens(50) == [5, 21, 37]


def test_an_aborted_request_has_no_ids():
    class Server:
        def abort(self, name):
            self.aborted = name

        def generate(self, *_, request_id, **__):
            meta = {"finish_reason": {"type": "abort"}}
            return type("Out", (), {"ids": [1, 2], "meta": meta})

    request = Request(4, [1], 8, {"temperature": 0.0}, 100.0)
    assert memory_card.ask(Server(), request) == memory_card.Answer(4, None, None)
