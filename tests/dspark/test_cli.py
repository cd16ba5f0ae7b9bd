"""Subcommands, and the device chosen before anything of SGLang is imported."""

import pytest
import torch

from dspark import cli, launch


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
    ("argv", "device"),
    [
        ([], None),
        (["--model-path", "x"], None),
        (["--device", "cpu"], "cpu"),
        (["--device=cuda:1"], "cuda:1"),
        (["--device", "cuda", "--device=cpu"], "cpu"),
        (["--device"], None),
    ],
)
def test_requested_device(argv, device):
    assert launch.requested_device(argv) == device


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
