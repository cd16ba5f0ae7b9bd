"""Subcommands, and the device chosen before anything of SGLang is imported."""

import os

import pytest
import torch

from dspark import cli
from dspark.errors import UsageError
from dspark.host import launch


def test_unknown_command_lists_the_known_ones(capsys):
    assert cli.main(["sevre"]) == 2
    err = capsys.readouterr().err
    assert "unknown command 'sevre'" in err
    assert all(name in err for name in cli.COMMANDS)


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_help_lists_the_commands(argv, capsys):
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


def test_arguments_reach_the_command(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "count", ("builtins:len", "counts"))
    assert cli.main(["count", "a", "b"]) == 2


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        ([], None),
        (["--model-path", "x"], None),
        (["--device", "cpu"], "cpu"),
        (["--device=cuda:1"], "cuda:1"),
        (["--device", "cuda", "--device=cpu"], "cpu"),
        (["--device"], None),
        (["--devices", "cpu"], None),
    ],
)
def test_last_value_of_a_flag(argv, value):
    assert launch.flag_value(argv, "--device") == value


def test_missing_model_is_one_sentence(tmp_path):
    with pytest.raises(UsageError, match="--model-path DIRECTORY is needed"):
        launch.check_model_path(["--port", "1"])
    with pytest.raises(UsageError, match="does not exist"):
        launch.check_model_path(["--model", str(tmp_path / "absent")])
    launch.check_model_path(["--model-path", str(tmp_path)])
    launch.check_model_path(["--model-path", "owner/name"])
    launch.check_model_path(["--help"])


@pytest.mark.parametrize(
    ("argv", "cuda", "resolved"),
    [
        (["x"], False, ["x", "--device", "cpu"]),
        (["x"], True, ["x"]),
        (["--device", "cuda"], False, ["--device", "cuda"]),
    ],
)
def test_cpu_is_chosen_only_without_cuda(monkeypatch, argv, cuda, resolved):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert launch.resolve_device(argv) == resolved


def test_half_of_the_cores_compute():
    assert [launch.cpu_threads(cores, 1) for cores in (1, 2, 3, 8)] == [1, 1, 1, 4]
    assert [launch.cpu_threads(8, ranks) for ranks in (2, 4, 8, 16)] == [2, 1, 1, 1]


def test_threads_are_chosen_where_the_user_did_not(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    launch.prepare_process(["--device", "cpu"])
    assert os.environ["OMP_NUM_THREADS"] == "7"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12))
    launch.prepare_process(["--device", "cpu", "--tp", "2"])
    assert os.environ["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    launch.prepare_process(["--device", "cpu", "--tp", "two"])  # for SGLang to refuse
    assert "OMP_NUM_THREADS" not in os.environ
