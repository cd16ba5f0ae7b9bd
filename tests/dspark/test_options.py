"""Flags beside SGLang's: what they set, what wins, how help and complaints name them."""

import argparse
import os

import pytest

from dspark import options
from dspark.errors import UsageError
from dspark.host import command_line
from dspark.speculation.settings import Settings

WITH_FLAG = [option for option in options.OPTIONS if option.flag]


@pytest.fixture
def parser(monkeypatch):
    """A parser with one flag of SGLang's; flags and variables are as before afterwards."""
    monkeypatch.setattr(options, "_flags_given", {})
    for option in WITH_FLAG:  # undone at the end, whatever a flag has set
        monkeypatch.setenv(option.variable, "")
        monkeypatch.delenv(option.variable)
    made = argparse.ArgumentParser(prog="server")
    command_line.add_flags(made)
    made.add_argument("--tensor-parallel-size", type=int)
    return made


@pytest.mark.parametrize("option", WITH_FLAG, ids=lambda option: option.flag)
def test_a_flag_sets_its_variable(parser, option, capsys):
    parser.parse_args([option.flag, "some value"])
    assert os.environ[option.variable] == "some value"
    parser.parse_args([f"{option.flag}=other"])
    assert os.environ[option.variable] == "other"
    parser.parse_args([])
    assert os.environ[option.variable] == "other"


def test_the_six_flags():
    assert [option.flag for option in WITH_FLAG] == [
        f"--dspark-{name}"
        for name in ("verify", "step-cost", "calibration", "verify-budget", "samples", "tuned")
    ]


def test_a_flag_wins_over_its_variable_and_says_so_once(parser, monkeypatch, capsys):
    monkeypatch.setenv("DSPARK_VERIFY", "scheduled")
    for _ in range(2):  # SGLang may parse twice
        parser.parse_args(["--dspark-verify", "cap-accept"])
    assert os.environ["DSPARK_VERIFY"] == "cap-accept"
    line = "dspark: --dspark-verify cap-accept counts, not DSPARK_VERIFY=scheduled.\n"
    assert capsys.readouterr().err == line


def test_nothing_is_said_where_both_agree(parser, monkeypatch, capsys):
    monkeypatch.setenv("DSPARK_VERIFY", "scheduled")
    parser.parse_args(["--dspark-verify", "scheduled"])
    assert capsys.readouterr().err == ""


def test_our_flags_are_the_first_of_the_help(parser):
    text = parser.format_help()
    positions = [text.index(f"  {option.flag} {option.values}") for option in WITH_FLAG]
    assert positions == sorted(positions)
    assert text.index("DSpark:") < positions[0]
    assert positions[-1] < text.index("options:") < text.index("  --tensor-parallel-size")
    assert text.index("options:") - text.index("DSpark:") < 2000  # a short section


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--tensor-paralel-size", "2"], "no flag --tensor-paralel-size; did you mean --tensor-p"),
        (["--dspark-verfy=static"], "no flag --dspark-verfy; did you mean --dspark-verify?"),
        (["--dspark-verify", "static", "--zzz"], r"no flag --zzz\.$"),
        (["stray"], r"stray belongs to no flag\.$"),
        (["--tensor-parallel-size", "two"], r"--tensor-parallel-size: invalid int value: 'two'\.$"),
        (["--dspark-samples"], r"--dspark-samples: expected one argument\.$"),
    ],
)
def test_what_cannot_be_parsed_is_one_sentence(parser, argv, said, capsys):
    with pytest.raises(UsageError, match=said):
        parser.parse_args(argv)
    assert capsys.readouterr() == ("", "")  # no usage of 400 lines


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--dspark-verify", "often"], "--dspark-verify often is none of static, scheduled, cap"),
        (["--dspark-verify-budget", "x"], "--dspark-verify-budget x must be a number"),
        (["--dspark-step-cost", "/nowhere"], "--dspark-step-cost: Cannot read /nowhere"),
        (
            ["--dspark-samples", "s.jsonl", "--dspark-verify", "scheduled"],
            "--dspark-samples collects .* with --dspark-verify scheduled:",
        ),
    ],
)
def test_a_bad_value_is_reported_by_the_flag_that_was_given(parser, argv, said):
    parser.parse_args(argv)
    with pytest.raises(UsageError, match=said):
        Settings.from_environment(gamma=5)


class Arguments:
    """What the log line of SGLang shows; `key` stands for any field."""

    def __init__(self, **fields):
        for name in command_line.SECRETS:
            setattr(self, name, fields.get(name))

    def __repr__(self):
        return f"ServerArgs({', '.join(f'{k}={v!r}' for k, v in vars(self).items())}, port=1)"


@pytest.mark.parametrize("field", command_line.SECRETS)
def test_secrets_are_not_in_the_representation(field):
    args = Arguments(**{field: 'it\'s "secret"'})
    shown = command_line.hide_keys(repr(args), args)
    assert "secret" not in shown
    assert f"{field}='***'" in shown
    assert shown.endswith("port=1)")
    plain = Arguments()
    assert command_line.hide_keys(repr(plain), plain) == repr(plain)
