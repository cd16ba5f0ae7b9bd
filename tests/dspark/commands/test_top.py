"""Frames of `dspark top`, from what a server answers."""

from collections import deque

import pytest
from rich.console import Console

from dspark.commands import top
from dspark.commands.local_server import free_port
from dspark.commands.top import Counters, NoAnswer, Rates, frame, keep, rates, read

LOAD = {
    "timestamp": 100.0,
    "num_running_reqs": 2,
    "num_waiting_reqs": 1,
    "max_running_requests": 8,
    "num_used_tokens": 8192,
    "max_total_num_tokens": 32768,
    "token_usage": 0.5,
    "total_prefill_uncached_tokens": 1000,
    "decode_moments": [10.0, 20.0, 400_000.0, 40.0, 0.0, 60.0],
}
LATER = LOAD | {
    "timestamp": 102.0,
    "total_prefill_uncached_tokens": 1500,
    "decode_moments": [50.0, 100.0, 2_400_000.0, 200.0, 0.0, 307.0],
}
DRAFTING = {
    "verify_steps": 1000,
    "verify_rows_run": 4500,
    "verify_rows_saved": 1500,
    "mean_accepted_length": 3.25,
    "acceptance_per_position": [0.75, 0.5],
    "steps_without_draft": 0,
    "warning": None,
}
ROW = {"rid": "one", "prompt": 12, "written": 34, "steps": 10, "delivered": 33, "rows": 45}


def moment(section=None, load=LOAD, requests=(), ranks=1):
    everywhere = {"routes": {"rank_sums": "by hand"}, "requests": list(requests)}
    info = {
        "model_path": "flash",
        "tp_size": ranks,
        "internal_states": [{"dspark": everywhere | (section or {})}],
    }
    return read(info, {"loads": [load]})


def lines_of(before, now, height=24) -> list[str]:
    return [text.plain for text in frame(before, now, height)]


def test_bars_are_as_long_as_their_share():
    assert [top.bar(share).count("█") for share in (-1, 0, 0.25, 1, 2)] == [0, 0, 6, 24, 24]
    assert {len(top.bar(share)) for share in (0, 0.3, 1)} == {top.BAR}


def test_a_drafting_server():
    lines = lines_of(moment(DRAFTING), moment(DRAFTING, LATER))
    assert lines == [
        "flash",
        "requests  " + "█" * 6 + "░" * 18 + "  2 of 8 at once",
        "pool      " + "█" * 6 + "░" * 18 + "  8,192 of 32,768 tokens",
        "fullest   " + "█" * 12 + "░" * 12 + "  50% of the pool's fullest part",
        "decoding  123.5 tokens/s, 50.0 ms a step",
        "prompts   250.0 tokens/s, 1 waiting",
        "drafts    3.25 tokens a verify step, 1,000 steps, 25% of rows saved",
        "draft 1   " + "█" * 18 + "░" * 6 + "  75%",
        "draft 2   " + "█" * 12 + "░" * 12 + "  50%",
    ]


def test_ranks_are_shown_where_there_are_several():
    assert "ranks     8, sums by hand" in lines_of(moment(), moment(ranks=8))


def test_rates_are_differences():
    one, two = (top.counters(load) for load in (LOAD, LATER))
    assert rates(one, two) == Rates(247 / 2, 250.0, 2000 / 40)
    assert rates(one, one) == Rates(None, None, None)
    assert rates(one, one._replace(at=101.0)) == Rates(0.0, 0.0, None)  # an idle second
    assert top.counters(LOAD | {"decode_moments": None}) == Counters(100.0, 0, 0, 0, 1000)


def test_counters_that_have_not_moved_are_no_interval():
    seen = deque(maxlen=3)
    first, later = moment(), moment(load=LATER)
    for taken in (first, later, later._replace(running=3)):
        keep(seen, taken)
    assert list(seen) == [first, later._replace(running=3)]


def test_requests_that_decode():
    young = ROW | {"rid": "two", "steps": 0, "delivered": 0, "rows": 0}
    now = moment(DRAFTING, requests=[ROW, young])
    assert [line.split() for line in lines_of(now, now)[-3:]] == [
        ["request", "prompt", "written", "tokens", "a", "step", "rows", "a", "step"],
        ["one", "12", "34", "3.30", "4.50"],
        ["two", "12", "34", "-", "-"],
    ]


@pytest.mark.parametrize(
    ("height", "names", "rest"),
    [(14, 4, None), (13, 2, "and 2 more"), (12, 1, "and 3 more"), (11, 0, None), (5, 0, None)],
)
def test_as_many_requests_as_fit(height, names, rest):
    now = moment(DRAFTING, requests=[ROW] * 4)
    lines = lines_of(now, now, height)
    assert sum(line.startswith("one ") for line in lines) == names
    assert (lines[-1] if lines[-1].startswith("and") else None) == rest
    assert len(lines) <= max(height, 9)


def test_a_name_that_a_client_chose_cannot_write_to_the_terminal():
    now = moment(DRAFTING, requests=[ROW | {"rid": "\x1b[2J\r\n长" + "x" * 40}])
    console = Console(width=80, height=24, record=True)
    row = lines_of(now, now)[-1]
    assert row.startswith("?[2J??长xx")
    assert row.isprintable()
    assert console.measure(row).maximum == len("request") + 17 + 8 + 9 + 15 + 13


def test_no_line_is_wider_than_the_terminal(capsys):
    console = Console(width=40, height=24)
    now = moment(DRAFTING, requests=[ROW])
    console.print(top.shown(now, now, console))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    assert max(map(len, lines)) <= 40


def test_pauses_of_drafting_are_shown():
    now = moment(DRAFTING | {"steps_without_draft": 1234})
    assert lines_of(now, now)[-1] == "paused    1,234 steps without drafts"


def test_a_warning_is_shown():
    warning = "no draft accepted in each of the last 200 steps"
    now = moment(DRAFTING | {"warning": warning})
    assert lines_of(now, now)[-1] == f"stuck: {warning}"


@pytest.mark.parametrize(
    ("section", "last"),
    [({}, "target-only: no drafts"), (DRAFTING | {"verify_steps": 0}, "no verify step yet")],
)
def test_without_drafts(section, last):
    now = moment(section)
    assert lines_of(now, now)[-1] == last


@pytest.mark.parametrize(
    ("answer", "loads"),
    [({"internal_states": [{}]}, {"loads": [LOAD]}), ({}, {}), ({"internal_states": []}, {})],
)
def test_another_server_is_told_apart(answer, loads):
    with pytest.raises(NoAnswer, match="none of this plugin's"):
        read(answer, loads)


def test_a_server_that_is_not_there_is_one_sentence(capsys):
    url = f"http://127.0.0.1:{free_port()}"
    assert top.main(["--url", url, "--once"]) == 1
    assert capsys.readouterr().err == f"dspark top: No SGLang server answers at {url}.\n"


def test_a_server_that_goes_away_leaves_its_last_frame(capsys):
    moments = iter([moment(DRAFTING)])

    def take():
        for taken in moments:
            return taken
        raise NoAnswer("gone")

    with pytest.raises(NoAnswer, match="gone"):
        top.watch(take, Console(width=80, height=24), 0.0)
    assert "2 of 8 at once" in capsys.readouterr().out


@pytest.mark.parametrize("every", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_between_frames_is_positive(every, capsys):
    with pytest.raises(SystemExit):
        top.main(["--every", every])
    assert f"invalid positive value: '{every}'" in capsys.readouterr().err
