"""Measured tables on disk: found again by the same machine, checkpoint and flags only."""

import json
import logging

import pytest

from dspark.speculation import step_cost_cache as cache
from dspark.speculation.step_cost import Steps

COST = (Steps(1, (1, 6), (0.010, 0.020), 0.0075), Steps(4, (4, 24), (0.020, 0.1), None))
HERE = {"machine": {"cores": 2}, "flags": {"tp_size": 1}, "checkpoint": ["a", 3]}
THERE = HERE | {"machine": {"cores": 4}}


@pytest.fixture(autouse=True)
def own_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_table_is_found_by_what_it_was_measured_on(own_directory):
    assert cache.find(HERE) is None
    file = cache.keep(HERE, COST)
    assert file.parent == own_directory / "sglang-dspark"
    assert cache.find(HERE) == COST
    assert cache.find(dict(reversed(HERE.items()))) == COST
    assert cache.find(THERE) is None
    cache.keep(HERE, COST[:1])
    assert cache.find(HERE) == COST[:1]
    assert [f.name for f in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"measured_on": 3, "steps": []}',
        json.dumps({"measured_on": HERE}).encode(),
        json.dumps({"measured_on": HERE, "steps": [{"requests": 1}]}).encode(),
        json.dumps({"measured_on": THERE, "steps": []}).encode(),
    ],
)
def test_a_corrupt_or_foreign_file_is_ignored_with_one_line(caplog, content):
    file = cache.keep(HERE, COST)
    file.write_bytes(content)
    assert cache.find(HERE) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(file) in record.getMessage()
    assert "\n" not in record.getMessage()
    cache.keep(HERE, COST)
    assert cache.find(HERE) == COST


def test_a_cache_that_cannot_be_written_is_one_line(caplog, monkeypatch, own_directory):
    (own_directory / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_directory / "file"))
    assert cache.keep(HERE, COST) is None
    (record,) = caplog.records
    assert "is not kept" in record.getMessage()
    assert cache.find(HERE) is None
