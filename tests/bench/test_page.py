"""`dspark report`: the page holds the record's figures, escaped, and nothing from elsewhere."""

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.bench.interval import Ratio
from dspark.bench.page import charts
from dspark.bench.page.cli import NoPage, main, render

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
TEMPLATE = ROOT / "bench" / "page" / "page.html.j2"
RECORDS = ("serve-cpu", "pair-cpu", "exact-cpu", "memory-24gb-h200")
VOID = {"meta"}
NASTY = "<script>alert('1')</script>\"&<img src=x>"

ENVIRONMENT = {
    "date": "2026-01-02T03:04:05Z",
    "command": "dspark bench pair --rounds 3",
    "source": {"commit": "0123abcd", "dirty": True},
    "python": "3.11.7",
    "packages": {"torch": "2.13"},
    "gpus": [],
    "cpu": {"model": "Some CPU", "cores": 2, "load": 0.25},
}
PROMPTS = {"set": "code", "synthetic": False, "prompts": 4, "input_tokens": 256, "sha256": "abc"}


def level(clients, end_to_end, accepted=()):
    return {
        "concurrency": clients,
        "tokens": 100 * clients,
        "scheduler_output": None,
        "decode_window": 2 * end_to_end,
        "end_to_end": end_to_end,
        "accepted_length": 1 + sum(accepted) if accepted else None,
        "acceptance_by_position": list(accepted),
        "step_time": 0.02,
        "ttft": {"p50": 0.1, "p90": 0.2, "p99": 0.3},
        "itl": {"p50": 0.01, "p90": 0.02, "p99": 0.03},
    }


def pair_record():
    def one(order, slow, fast):
        return {
            "order": order,
            "levels": {"A": [level(1, slow)], "B": [level(1, fast, [0.75, 0.5])]},
        }

    return {
        "kind": "pair",
        "environment": ENVIRONMENT,
        "model": "small",
        "prompts": PROMPTS,
        "output_tokens": 100,
        "arms": {"A": {"label": "alone", "flags": []}, "B": {"label": "fast", "flags": ["--x"]}},
        "outputs_identical": True,
        "differences": [],
        "speed_up": {"1": {"end_to_end": {"geomean": 2.0, "low": 1.5, "high": 2.5, "pairs": 3}}},
        "rounds": [one("AB", 10.0, 20.0), one("BA", 11.0, 22.0), one("AB", 30.0, 61.0)],
    }


class Parsed(HTMLParser):
    """What stands on a page; an element that is not closed is an error."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[tuple[str, str]] = []  # (element, text)
        self.rows: list[list[str]] = []  # of all tables
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in VOID:
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.append((self.open[-1], data))
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def of(self, element: str) -> list[str]:
        return [text for tag, text in self.texts if tag == element]

    def facts(self) -> dict[str, str]:
        return dict(zip(self.of("dt"), self.of("dd"), strict=True))

    def count(self, element: str) -> int:
        return sum(tag == element for tag, _ in self.tags)


def row(page: Parsed, *start: str) -> list[str]:
    """The only row that starts so."""
    (found,) = (cells for cells in page.rows if cells[: len(start)] == list(start))
    return found


def test_a_pair():
    page = Parsed(render(pair_record()))
    assert page.of("h1") == ["fast over alone"]
    assert page.of("strong") == ["SAME TOKENS"]
    # three rounds of two arms with 100 tokens each
    assert "All 600 tokens of both arms in 3 rounds are identical." in page.of("p")
    assert row(page, "1 client, end to end")[1:] == ["2.000", "1.500 to 2.500", "3", "yes"]
    assert page.facts() == {
        "model": "small",
        "prompts": "4 of kind code, 256 tokens each",
        "prompt hash": "abc",
        "output": "100 tokens each, temperature 0",
        "flags of alone": "none",
        "flags of fast": "--x",
        "date": "2026-01-02T03:04:05Z",
        "command": "dspark bench pair --rounds 3",
        "commit": "0123abcd, with changes",
        "GPU": "none",
        "CPU": "2 cores of Some CPU, load 0.25",
        "Python": "3.11.7",
        "packages": "torch 2.13",
    }
    # medians of 10, 11, 30 and of 20, 22, 61
    assert row(page, "1", "-", "22.0", "11.0")[4] == "-"
    assert row(page, "1", "-", "44.0", "22.0")[4] == "2.25"
    assert row(page, "1", "75.0%")[2:] == ["50.0%"]
    assert row(page, "2", "BA")[2:] == ["11.0", "22.0"]
    # decode window and end to end of two arms, two positions; one ratio
    assert page.count("rect") == 2 * 2 + 2
    assert page.count("circle") == 1


DIFFERENCE = {
    "prompt": 3,
    "position": 17,
    "reference": "A round 1 C1",
    "other": "B round 2 C1",
    "expected": 5,
    "found": 6,
}
FIRST = "First: token 17 of prompt 3 is 5 in A round 1 C1 and 6 in B round 2 C1."


def test_different_tokens_come_first_and_there_is_no_ratio():
    record = pair_record() | {
        "outputs_identical": False,
        "differences": [DIFFERENCE],
        "speed_up": None,
    }
    page = Parsed(render(record))
    assert page.of("strong") == ["DIFFERENT TOKENS"]
    assert f"1 output differs. {FIRST}" in page.of("p")
    assert "No ratio: the arms did not do the same work." in page.of("p")
    assert page.count("circle") == 0
    assert "2.000" not in render(record)


@pytest.mark.parametrize("found", [0, 2])
def test_token_by_token(found):
    gap = {"tokens": [5, 6], "logprobs": [-0.5, -0.75], "gap_nats": 0.25}
    record = {
        "kind": "exact",
        "environment": ENVIRONMENT,
        "model": "small",
        "prompts": PROMPTS,
        "output_tokens": 100,
        "modes": {"target-only": "", "DSpark": "--x"},
        "starts": 2,
        "runs": ["one", "two"],
        "tokens_compared": 1234,
        "distinct_tokens": 99,
        "identical": not found,
        "differences": [DIFFERENCE | gap] * found,
    }
    page = Parsed(render(record))
    assert page.of("h1") == ["Tokens of target-only and DSpark"]
    assert page.facts()["distinct tokens"] == "99"
    if found:
        assert page.of("strong") == ["DIFFERENT TOKENS"]
        assert f"2 outputs differ. {FIRST}" in page.of("p")
        assert ["3", "17", "A round 1 C1", "B round 2 C1", "5", "6", "0.2500"] in page.rows
    else:
        assert page.of("strong") == ["SAME TOKENS"]
        assert "All 1,234 tokens of 2 runs are identical." in page.of("p")


def test_outputs_that_could_not_be_compared():
    page = Parsed(render(pair_record() | {"outputs_identical": None}))
    assert page.of("strong") == ["NOT COMPARED"]
    assert page.count("circle") == 1


def test_an_interval_that_holds_one_is_no_difference():
    record = pair_record()
    record["speed_up"]["1"]["end_to_end"]["low"] = 0.9
    assert row(Parsed(render(record)), "1 client, end to end")[-1] == "no"


def test_arms_with_one_label_are_told_apart():
    record = pair_record()
    record["arms"]["B"]["label"] = "alone"
    page = Parsed(render(record))
    assert page.of("h1") == ["alone (B) over alone (A)"]
    assert page.of("caption")[:2] == ["alone (A)", "alone (B)"]


def test_one_server():
    one, four = level(1, 10.0, [0.75]), level(4, 30.0, [0.5])
    shares = {"scheduler_output": None, "decode_window": 1.0, "end_to_end": 0.75}
    record = {
        "kind": "serve",
        "environment": ENVIRONMENT,
        "server": {"tp_size": 8, "page_size": 256},
        "model": "small",
        "prompts": PROMPTS | {"synthetic": True},
        "output_tokens": 100,
        "levels": [one | {"of_linear": shares}, four | {"of_linear": shares}],
    }
    page = Parsed(render(record))
    assert page.of("strong") == ["NOT COMPARED"]
    assert page.facts()["tp size"] == "8"
    assert page.facts()["prompts"] == "4 of kind synthetic random ids, 256 tokens each"
    assert row(page, "4", "-", "60.0")[3:] == [
        "30.0", "1.50", "20.0", "100", "300", "10.0", "30.0"
    ]  # fmt: skip
    assert row(page, "4", "-", "100.0%")[3:] == ["75.0%"]
    assert row(page, "4", "50.0%") == ["4", "50.0%"]
    tallest = max(float(tag["height"]) for name, tag in page.tags if name == "rect")
    assert tallest == charts.HEIGHT - charts.TOP - charts.BOTTOM  # 60 tokens/s of an axis to 60


def test_no_drafts_no_chart_of_them():
    record = pair_record()
    for one in record["rounds"]:
        one["levels"]["B"][0]["acceptance_by_position"] = []
    page = Parsed(render(record))
    assert "No draft was verified." in page.of("p")
    assert page.count("rect") == 4


@pytest.mark.parametrize("where", ["label", "command", "model", "set"])
def test_text_of_a_record_is_escaped(where):
    record = copy.deepcopy(pair_record())
    record["arms"]["A"]["label"] = NASTY if where == "label" else "alone"
    record["environment"]["command"] = NASTY if where == "command" else "x"
    record["model"] = NASTY if where == "model" else "small"
    record["prompts"]["set"] = NASTY if where == "set" else "code"
    page = Parsed(render(record))
    assert {"script", "img"}.isdisjoint(tag for tag, _ in page.tags)
    assert NASTY in "".join(text for _, text in page.texts)


@pytest.mark.parametrize("name", RECORDS)
def test_a_page_asks_for_nothing_from_elsewhere(name):
    html = render(json.loads((RESULTS / f"{name}.json").read_text()))
    page = Parsed(html)
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "use")
        assert not {"src", "href", "xlink:href", "srcset", "style"} & set(attributes)
    assert not re.search(r"url\(|@import", "".join(page.of("style")))
    policy = [tag.get("content") for name, tag in page.tags if "http-equiv" in tag]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_the_shipped_records_show_their_figures():
    serve, pair, exact, memory = (
        Parsed(render(json.loads((RESULTS / f"{name}.json").read_text()))) for name in RECORDS
    )
    assert row(serve, "8", "322.5", "292.0", "182.3")[4] == "3.95"
    assert row(serve, "8", "87.2%")[1:] == ["87.2%", "73.2%", "59.1%", "47.9%", "35.4%"]
    assert row(pair, "4 clients, end to end")[1:] == ["1.435", "1.363 to 1.512", "8", "yes"]
    assert "All 10,240 tokens of both arms in 8 rounds are identical." in pair.of("p")
    assert "All 8,192 tokens of 8 runs are identical." in exact.of("p")
    assert exact.facts()["flags of DSpark"] == "--speculative-algorithm dspark"
    assert memory.of("strong") == ["0 OF 806 REQUESTS FAILED"]
    # 20,636,952,252 bytes of 24,039,430,080 in the first case
    assert next(r for r in memory.rows if r[0] == "weights") == ["weights", "19.22", "85.8%"]


def colours(theme: str) -> dict[str, str]:
    css = TEMPLATE.read_text()
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    return dict(re.findall(r"--(\w+): (#\w{6})", blocks[theme == "dark"]))


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it: 1 to 21."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everything_can_be_read_in_light_and_in_dark(theme):
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    of = colours(theme)
    assert contrast(of["ink"], of["paper"]) > 12
    assert contrast(of["soft"], of["paper"]) > 4.5
    for name in ("ink", "good", "bad", "open"):
        assert contrast(of[name], of["card"]) > 4.5
    for i in range(6):
        assert contrast(of[f"s{i}"], of["paper"]) > 3
    assert (contrast(of["paper"], "#ffffff") == 1) == (theme == "light")


def test_bars_by_hand():
    drawn = charts.bars("t", ["a", "b"], {"x": [5.0, 10.0], "y": [None, 2.5]}, "s")
    ground, height = 240 - 26, 240 - 10 - 26
    group = (640 - 48 - 8) / 2
    assert [tick.text for tick in drawn.values] == ["0", "2", "4", "6", "8", "10"]
    assert [(bar.series, round(bar.height, 6)) for bar in drawn.bars] == [
        (0, height / 2), (0, height), (1, height / 4)
    ]  # fmt: skip
    assert all(bar.y + bar.height == pytest.approx(ground) for bar in drawn.bars)
    assert drawn.bars[2].x == pytest.approx(48 + 1.15 * group + 0.35 * group)
    assert drawn.bars[2].says == "y, b: 2.5 s"
    assert charts.bars("t", ["a"], {"x": [None]}, "s") is None
    assert charts.bars("t", ["a"], {"x": [0.0]}, "s") is None


def test_intervals_by_hand():
    drawn = charts.intervals("t", {"x": Ratio(2.0, 1.5, 2.5, 8), "y": Ratio(1.0, 0.5, 1.5, 8)})
    assert [tick.text for tick in drawn.values] == ["0.5", "1.0", "1.5", "2.0", "2.5"]
    left, right = 190, 640 - 8 - 10
    x, y = drawn.intervals
    assert (y.low, x.high) == (left, right)
    assert (y.middle, drawn.one) == (left + (right - left) / 4,) * 2
    assert x.middle == pytest.approx(left + (right - left) * 3 / 4)
    assert (x.y, y.y) == (13, 39)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_hold_the_span_in_few_round_steps(low, span):
    values = charts.ticks(low, low + span)
    step = charts.step_of(span)
    assert 2 <= len(values) <= charts.TICKS + 2
    assert values[0] <= low + 1e-6 * step
    assert values[-1] >= low + span - 1e-6 * step
    assert f"{step:e}"[0] in "125"
    assert f"{step:e}"[2:8] == "000000"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "holds no record"),
        ('{"kind": "x"}', "records of kind 'x' have no page; serve, pair, exact, memory have"),
        ("{}", "records of kind None have no page"),
        ('{"kind": "pair"}', "not complete: KeyError: 'arms'"),
        ('{"cases": {"x": {}}}', "not complete"),
    ],
)
def test_what_is_no_record_is_one_sentence(text, message, tmp_path, capsys):
    run, page = tmp_path / "run.json", tmp_path / "page.html"
    run.write_text(text)
    assert main([str(run), "-o", str(page)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not page.exists()


def test_a_page_is_written(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main([str(RESULTS / "pair-cpu.json"), "-o", str(page)]) == 0
    assert capsys.readouterr().out == f"Wrote {page}.\n"
    assert page.read_text().startswith("<!doctype html>\n<html lang=")
    assert main([str(RESULTS / "pair-cpu.json"), "-o", str(tmp_path)]) == 2


def test_a_missing_field_is_named():
    record = pair_record()
    del record["prompts"]["sha256"]
    with pytest.raises(NoPage, match="'sha256'"):
        render(record)
