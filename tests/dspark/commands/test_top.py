"""One frame of `dspark top`, from what a server answers."""

import io

import pytest
from rich.console import Console

from dspark.commands import top
from dspark.commands.local_server import free_port
from dspark.commands.top import NoAnswer, frame, read

LOADS = {
    "loads": [
        {
            "num_running_reqs": 2,
            "num_waiting_reqs": 1,
            "max_running_requests": 8,
            "num_used_tokens": 8192,
            "max_total_num_tokens": 32768,
            "gen_throughput": 123.45,
        }
    ]
}
DRAFTING = {
    "verify_steps": 1000,
    "verify_rows_run": 4500,
    "verify_rows_saved": 1500,
    "mean_accepted_length": 3.25,
    "acceptance_per_position": [0.75, 0.5],
    "warning": None,
}


def info(section):
    return {"model_path": "flash", "internal_states": [{"dspark": section}]}


def shown(snapshot) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=100).print(frame(snapshot))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_bars_are_as_long_as_their_share():
    assert [top.bar(share).count("█") for share in (-1, 0, 0.25, 1, 2)] == [0, 0, 6, 24, 24]
    assert {len(top.bar(share)) for share in (0, 0.3, 1)} == {top.BAR}


def test_a_drafting_server():
    lines = shown(read(info(DRAFTING), LOADS))
    assert lines[0] == "flash"
    assert lines[1].split() == ["requests", "█" * 6 + "░" * 18, "2", "of", "8,", "1", "waiting"]
    assert lines[2].endswith("8,192 of 32,768 tokens")
    assert lines[3].split() == ["decoding", "123.5", "tokens/s"]
    assert lines[4] == "drafts: 3.25 tokens a verify step, 1,000 steps, 25% of the rows saved"
    assert lines[5].split() == ["draft", "1", "█" * 18 + "░" * 6, "75%"]
    assert lines[6].split()[-1] == "50%"
    assert len(lines) == 7


def test_a_warning_is_shown():
    warning = "no draft accepted in each of the last 200 steps"
    assert shown(read(info(DRAFTING | {"warning": warning}), LOADS))[-1] == f"stuck: {warning}"


@pytest.mark.parametrize(
    ("section", "last"),
    [({}, "target-only: no drafts"), (DRAFTING | {"verify_steps": 0}, "no verify step yet")],
)
def test_without_drafts(section, last):
    assert shown(read(info(section), LOADS))[-1] == last


@pytest.mark.parametrize(
    ("answer", "loads"), [({"internal_states": [{}]}, LOADS), (info({}), {"loads": []}), ({}, {})]
)
def test_another_server_is_told_apart(answer, loads):
    with pytest.raises(NoAnswer, match="none of this plugin's"):
        read(answer, loads)


def test_a_server_that_is_not_there_is_one_sentence(capsys):
    url = f"http://127.0.0.1:{free_port()}"
    assert top.main(["--url", url, "--once"]) == 1
    assert capsys.readouterr().err == f"dspark top: No SGLang server answers at {url}.\n"
