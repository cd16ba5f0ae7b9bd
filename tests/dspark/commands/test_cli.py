"""Subcommands, and the device chosen before anything of SGLang is imported."""

import importlib.metadata
import os
import socket
import subprocess
import sys

import pytest
import torch

from dspark import cli
from dspark.errors import UsageError
from dspark.host import command_line, launch


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
    assert command_line.flag_value(argv, "--device") == value


def test_missing_model_is_one_sentence(tmp_path):
    with pytest.raises(UsageError, match="--model-path DIRECTORY is needed"):
        launch.check_model_path(["--port", "1"])
    with pytest.raises(UsageError, match="does not exist"):
        launch.check_model_path(["--model", str(tmp_path / "absent")])
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        launch.check_model_path(["--model-path", str(tmp_path)])
    (tmp_path / "config.json").write_text("{}")
    launch.check_model_path(["--model-path", str(tmp_path)])
    launch.check_model_path(["--model-path", "owner/name"])
    launch.check_model_path(["--config=server.yaml"])


def test_a_corrupt_config_is_one_sentence(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json is not JSON"):
        launch.check_model_path(["--model-path", str(tmp_path)])


@pytest.mark.parametrize("port", ["0", "-1", "65536", "99999999"])
def test_a_port_out_of_range_is_one_sentence(port):
    with pytest.raises(UsageError, match=f"--port {port} must be 1 to 65535"):
        launch.check_port(["--port", port])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_port_in_use_is_one_sentence(host):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with pytest.raises(UsageError, match=f"--host {host} --port {port}: Address already in"):
            launch.check_port(["--host", host, f"--port={port}"])
    launch.check_port(["--host", host, "--port", port])


def test_a_host_that_is_not_ours_is_one_sentence():
    with pytest.raises(UsageError, match=r"cannot listen on --host 203\.0\.113\.7 --port 30000"):
        launch.check_port(["--host", "203.0.113.7"])
    with pytest.raises(UsageError, match=r"cannot listen on --host no\.such\.host\.invalid"):
        launch.check_port(["--host", "no.such.host.invalid"])


def test_what_sglang_will_say_of_a_port_is_left_to_it():
    launch.check_port(["--port", "http"])
    launch.check_port(["--port", "0", "--config", "server.yaml"])


def test_another_sglang_is_refused_before_the_model_is_looked_at(monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.5.23" if name == "sglang" else real(name)
    )
    with pytest.raises(UsageError, match=r"SGLang 0\.5\.17 only, but found 0\.5\.23"):
        launch.main(["--model-path", "/nowhere"])


def test_version_names_both_packages(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == (
        f"sglang-dspark {importlib.metadata.version('sglang-dspark')}, SGLang 0.5.17\n"
    )


def run_python(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "dspark.cli", "python", *argv],
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_python_runs_code_files_and_modules_with_their_arguments(tmp_path):
    show = "import sys; print(__name__, sys.argv[1:], 'sgl_kernel' in str(sys.meta_path[0].names))"
    (tmp_path / "tool.py").write_text(show)
    assert run_python("-c", show, "-x").stdout == "__main__ ['-x'] True\n"
    assert run_python(str(tmp_path / "tool.py"), "a").stdout == "__main__ ['a'] True\n"
    assert run_python("-m", "json.tool", "--help").stdout.startswith("usage: ")
    refused = run_python("-z")
    assert refused.returncode == 1
    assert refused.stderr == (
        "dspark: dspark python takes -m MODULE, -c CODE or a file, and its arguments.\n"
    )


TOOLS = "sglang.bench_serving", "sglang.test.run_eval", "sglang.test.few_shot_gsm8k"


def test_sglangs_own_tools_can_be_imported():
    """All in one process: each imports SGLang, which takes a while."""
    done = run_python("-c", f"import {', '.join(TOOLS)}; print('imported')")
    assert done.stdout.endswith("imported\n"), done.stderr[-2000:]


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
