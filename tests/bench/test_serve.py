"""Arguments, tables and records of `dspark bench serve`; what a record says of its machine."""

import json
import subprocess

import pytest

from dspark.bench import cli, environment, serve
from dspark.bench.client import Step, Trace
from dspark.bench.measure import Level
from dspark.bench.table import number, table
from dspark.bench.throughput import summarise


def test_everything_after_the_dashes_goes_to_the_server():
    options, flags = serve.parse(
        ["--model-path", "m", "--concurrency", "1", "3", "--", "--tp", "2", "--", "x"]
    )
    assert options.concurrency == [1, 3]
    assert (options.input_tokens, options.output_tokens, options.prompts) == (256, 128, "code")
    assert flags == ["--tp", "2", "--", "x"]


@pytest.mark.parametrize(
    "argv", [[], ["--url", "u", "--model-path", "m"], ["--url", "u", "--", "--tp", "2"]]
)
def test_exactly_one_server(argv):
    with pytest.raises(SystemExit):
        serve.parse(argv)


@pytest.fixture
def measured(monkeypatch):
    """Levels without a server: C clients finish 8 tokens in C seconds."""

    def measure(target, prompts, new_tokens):
        clients = len(prompts)
        trace = Trace(0.0, [Step(0.5, 1), Step(float(clients), 8)], float(clients), None, 2, [1, 1])
        return Level(summarise([trace] * clients, 0.0, []), [None] * clients)

    monkeypatch.setattr(serve, "measure", measure)
    monkeypatch.setattr(serve, "warm_up", lambda *_: None)
    monkeypatch.setattr(serve, "info", lambda _: {"version": "0.5.17", "tp_size": 1, "secret": 1})
    monkeypatch.setattr(serve, "model_path_of", lambda _: None)


def test_a_run_prints_a_table_and_writes_a_record(measured, tmp_path, capsys):
    file = tmp_path / "out" / "serve.json"
    argv = ["--url", "http://h:1/", "--concurrency", "1", "2", "--input-tokens", "8"]
    assert serve.main([*argv, "--prompts", "synthetic", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "SYNTHETIC random ids" in out
    assert "-/100%/50%" not in out
    record = json.loads(file.read_text())
    assert record["prompts"]["synthetic"]
    assert record["server"] == {"version": "0.5.17", "tp_size": 1}
    single, double = record["levels"]
    assert (single["end_to_end"], double["end_to_end"]) == (8.0, 8.0)
    assert double["of_linear"]["end_to_end"] == 0.5
    assert single["accepted_length"] == 3.5
    assert record["environment"]["packages"]["torch"]


def test_too_few_prompts_end_with_one_sentence(measured, capsys):
    assert serve.main(["--url", "u", "--input-tokens", "100000"]) == 2
    assert "dspark bench serve: The code text holds 0 prompts" in capsys.readouterr().err


def test_unknown_benchmarks_list_the_known_ones(capsys):
    assert cli.main(["race"]) == 2
    err = capsys.readouterr().err
    assert all(name in err for name in cli.COMMANDS)
    assert cli.main([]) == 0


def test_table_and_numbers():
    assert table(["a", "bb"], [["10", "2"]]) == " a  bb\n10   2"
    assert (number(None), number(0.0123, 1, 1e3)) == ("-", "12.3")


def test_environment_names_commit_packages_and_machine(tmp_path):
    record = environment.describe(["--tp", "2"])
    assert record["flags"] == ["--tp", "2"]
    assert record["cpu"]["cores"] >= 1
    assert record["packages"].keys() >= {"torch", "triton", "transformers"}
    json.dumps(record)
    assert environment.source(tmp_path) == {"commit": None, "dirty": None}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    clean = environment.source(tmp_path)
    assert len(clean["commit"]) == 40
    assert not clean["dirty"]
    (tmp_path / "file").write_text("2")
    assert environment.source(tmp_path) == {"commit": clean["commit"], "dirty": True}


def test_gpus_are_read_from_the_driver_s_tool(monkeypatch):
    lines = "NVIDIA L4, 580.1, 2040, 2040, 6251, 72.00\nNVIDIA L4, 580.1, 300, 2040, 6251, 72.00"
    monkeypatch.setattr(environment, "_output", lambda *_: lines)
    first, second = environment.gpus()
    assert (first["name"], first["driver_version"], first["clocks.sm"]) == (
        "NVIDIA L4",
        "580.1",
        "2040",
    )
    assert second["clocks.sm"] == "300"
    monkeypatch.setattr(environment, "_output", lambda *_: None)
    assert environment.gpus() == []
