"""README and docs/ show what bench/results says, and would not pass if they did not."""

import json
import re
from pathlib import Path

import pytest

from dspark.bench import report
from dspark.bench.charts import CHARTS, data_hash, draw_all
from dspark.bench.medians import median_figures, median_levels
from dspark.bench.report import MARKED, PAGES, RESULTS, TABLES, ReportError, regenerate

ROOT = Path(__file__).resolve().parents[2]

ENVIRONMENT = {
    "date": "2026-01-02T03:04:05Z",
    "packages": {"torch": "2.13", "sglang": "0.5.17"},
    "source": {"commit": "0123456789abcdef", "dirty": False},
    "gpus": [],
    "cpu": {"model": "Some CPU", "cores": 2, "load": 0.25},
}


def level(clients, window, accepted=None):
    return {
        "concurrency": clients,
        "scheduler_output": None,
        "decode_window": window,
        "end_to_end": window / 2,
        "accepted_length": accepted,
        "acceptance_by_position": [0.75, 0.5] if accepted else [],
        "step_time": 0.02,
        "ttft": {"p50": 0.1, "p90": 0.2, "p99": 0.3},
        "itl": {"p50": 0.01, "p90": 0.02, "p99": 0.03},
    }


def pair_record():
    rounds = [
        {"order": order, "levels": {"A": [level(1, 10.0 + i)], "B": [level(1, 20.0 + i, 2.5)]}}
        for i, order in enumerate(("AB", "BA", "AB"))
    ]
    return {
        "environment": ENVIRONMENT,
        "model": "small",
        "prompts": {"set": "code", "synthetic": False, "input_tokens": 8, "sha256": "ab" * 32},
        "output_tokens": 4,
        "arms": {"A": {"label": "target-only"}, "B": {"label": "DSpark"}},
        "outputs_identical": True,
        "speed_up": {
            "1": {
                name: {"geomean": 1.9, "low": 1.8, "high": 2.0, "pairs": 3}
                for name in ("decode_window", "end_to_end")
            }
        },
        "rounds": rounds,
    }


def text_of(page):
    return (ROOT / page).read_text()


@pytest.fixture
def results(tmp_path):
    (tmp_path / "pair-cpu.json").write_text(json.dumps(pair_record()))
    return tmp_path


README = """# x
<!-- bench:serving-cpu -->
old
<!-- /bench -->
<!-- bench:speed-up-cpu -->
<!-- /bench -->
"""


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_the_committed_records(page):
    text = (ROOT / page).read_text()
    assert regenerate(text, ROOT / RESULTS) == text, "run `python -m dspark.bench.report`"


def test_charts_are_as_new_as_their_records():
    for name, (file, _, _) in CHARTS.items():
        source = ROOT / RESULTS / file
        chart = ROOT / "bench/charts" / name
        assert chart.exists() == source.exists(), name
        if source.exists():
            assert data_hash(source) in chart.read_text(), f"{name} is older than {file}"


def test_every_chart_that_is_shown_is_there():
    shown = [
        name for page in PAGES for name in re.findall(r"bench/charts/([\w.-]+)", text_of(page))
    ]
    assert len(shown) >= 4
    assert set(shown) <= set(CHARTS)
    assert all((ROOT / "bench/charts" / name).exists() for name in shown)


def test_tables_come_from_the_record(results):
    text = regenerate(README, results)
    assert "| target-only | 1 | - | 11.0 | 5.5 | - | 20.0 | 100 | 10.0 | 30.0 |" in text
    assert "| DSpark | 1 | - | 21.0 | 10.5 | 2.50 |" in text
    assert "| 1 client, decode window | 1.90x | 1.80 to 2.00 | 3 |" in text
    assert "code prompts, 8 input and 4 output tokens" in text
    assert "2 cores of Some CPU, no GPU, load average 0.2" in text
    assert "commit 0123456789" in text
    assert "old" not in text
    assert regenerate(text, results) == text


def test_throughputs_over_clients_show_their_share_of_linear(results):
    shares = {"scheduler_output": None, "decode_window": 0.456, "end_to_end": 0.9}
    levels = [level(4, 80.0, 2.5) | {"of_linear": shares}]
    record = pair_record() | {"levels": levels}
    (results / "serve-cpu.json").write_text(json.dumps(record))
    text = regenerate("<!-- bench:scaling-cpu -->\n<!-- /bench -->\n", results)
    assert "| 4 | - | 80.0 (46 %) | 40.0 (90 %) | 2.50 | 20.0 |" in text


def test_a_changed_number_is_noticed(results, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "REPOSITORY", tmp_path)
    monkeypatch.setattr(report, "RESULTS", Path())
    monkeypatch.setattr(report, "PAGES", ("README.md",))
    readme = tmp_path / "README.md"
    readme.write_text(regenerate(README, results))
    assert report.main(["--check"]) == 0
    readme.write_text(readme.read_text().replace("21.0", "42.0"))
    assert report.main(["--check"]) == 1


def test_different_outputs_show_no_ratio(results):
    record = pair_record() | {"speed_up": None, "outputs_identical": False}
    (results / "pair-cpu.json").write_text(json.dumps(record))
    text = regenerate(README, results)
    assert "No speed-up: the outputs of DSpark and target-only differ." in text
    assert "1.90x" not in text


def test_synthetic_prompts_are_labelled(results):
    record = pair_record()
    record["prompts"]["synthetic"] = True
    (results / "pair-cpu.json").write_text(json.dumps(record))
    assert "synthetic random ids" in regenerate(README, results)


@pytest.mark.parametrize(
    ("name", "message"), [("nothing", "known are"), ("exact-cpu", "exact-cpu.json, which is not")]
)
def test_missing_figures_are_named(results, name, message):
    with pytest.raises(ReportError, match=message):
        regenerate(f"<!-- bench:{name} -->\n<!-- /bench -->", results)


def marker_names(page: Path) -> list[str]:
    return [match["name"] for match in MARKED.finditer(page.read_text())]


def test_every_marker_is_known_stands_once_a_language_and_on_a_page_that_is_written():
    english = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    chinese = [ROOT / "README.zh.md", *(ROOT / "docs" / "zh").glob("*.md")]
    for pages in (english, chinese):
        names = [name for page in pages for name in marker_names(page)]
        assert set(names) <= {*TABLES, "options", "summary"}
        assert len(names) == len(set(names))
    shown = {str(page.relative_to(ROOT)) for page in (*english, *chinese) if marker_names(page)}
    assert shown == set(PAGES)
    for page in PAGES:  # no marker that is not understood
        assert text_of(page).count("<!-- bench:") == len(marker_names(ROOT / page))


def test_the_summary_says_what_failed(results):
    from dspark.bench import summary

    assert summary.speed_up(pair_record()) == "1.90x with 1 client"
    assert summary.speed_up(pair_record() | {"speed_up": None}) == "none: the outputs differ"
    exact = {"identical": False, "differences": [{}], "tokens_compared": 1024, "starts": 2}
    assert summary.exactness(exact) == "1,024 tokens over 2 cold starts: 1 difference"
    assert summary.promises({"figures": [{"holds": True}, {"holds": False}]}) == (
        "1 of 2 cases keep every promise"
    )
    with pytest.raises(ReportError, match=r"summary needs bench/results/exact-cpu\.json"):
        report.summary_table(results)


def test_medians_need_most_rounds():
    rounds = [
        {"clients": 4, "a": a, "b": None if a else 1.0, "c": [c, 4.0]}
        for a, c in ((None, 1.0), (2.0, 3.0), (4.0, 5.0))
    ]
    # `b` is known in one round of three.
    assert median_figures(rounds) == {"clients": 4, "a": 3.0, "b": None, "c": [3.0, 4.0]}
    (figures,) = median_levels(pair_record(), "B")
    assert figures["decode_window"] == 21.0
    assert figures["ttft"] == {"p50": 0.1, "p90": 0.2, "p99": 0.3}


def test_charts_can_be_drawn_and_name_their_data(results):
    pytest.importorskip("matplotlib")
    drawn = draw_all(results, results / "charts")
    assert [file.name for file in drawn] == ["throughput-cpu.svg", "acceptance-cpu.svg"]
    for file in drawn:
        assert data_hash(results / "pair-cpu.json") in file.read_text()
