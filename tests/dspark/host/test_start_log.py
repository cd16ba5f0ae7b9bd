"""Warnings that are untrue for DeepSeek-V4, and only those, are left out of the log."""

import importlib
import logging
import re
from pathlib import Path

import pytest

from dspark.host import start_log


@pytest.fixture
def model(monkeypatch):
    """Filters as in a server whose model is `model["ours"]`, taken off again at the end."""
    served = {"ours": True}
    loggers = [logging.getLogger(name) for name in dict(start_log.UNTRUE)]
    before = [list(logger.filters) for logger in loggers]
    for logger in loggers:  # other tests of this process may have installed them for good
        logger.filters = []
    start_log.leave_out_what_is_untrue(lambda: served["ours"])
    yield served
    for logger, filters in zip(loggers, before, strict=True):
        logger.filters = filters


@pytest.mark.parametrize(("name", "start"), start_log.UNTRUE)
def test_the_untrue_warning_is_left_out_for_our_model_only(model, name, start):
    def shown(message: str) -> bool:
        record = logging.LogRecord(name, logging.WARNING, "", 0, message, (), None)
        return bool(logging.getLogger(name).filter(record))

    assert not shown(f"{start} More words.")
    assert shown("Something else is wrong.")
    model["ours"] = False
    assert shown(f"{start} More words.")


def test_the_texts_are_those_that_the_libraries_log():
    """A library that words its warning anew would bring it back unnoticed."""
    for name, start in start_log.UNTRUE:
        source = Path(importlib.import_module(name).__file__).read_text()
        joined = re.sub(r'"\s+"', "", source)  # a text written over several lines
        assert start in joined, name
