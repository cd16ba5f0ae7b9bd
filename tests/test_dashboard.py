"""docs/deploy/grafana-dashboard.json asks only for what a server exports, and stands in order.

Metrics are asked for by `__name__`: whether a colon stays or becomes an underscore is agreed
between a Prometheus and the server's client library.
"""

import ast
import importlib.util
import json
import re
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DASHBOARD = json.loads((ROOT / "docs" / "deploy" / "grafana-dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
METRIC = re.compile(r"\b(?:sglang|dspark):\w+")
ASKED = re.compile(r"\b(sglang|dspark)\[:_\](\w+)")
SELECTOR = re.compile(r"(rate\()?\{([^}]*)\}(\[\$__rate_interval\])?")
CHOSEN = re.compile(r'__name__=~"(?:sglang|dspark)\[:_\](\w+)",instance=~"\$instance"')
SERIES = {
    "Gauge": ("",),
    "Counter": ("",),
    "Histogram": ("_bucket", "_sum", "_count"),
}


def series_of(source: str) -> set[str]:
    """Names of the time series that a module declares with prometheus_client."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        names = [word.value for word in node.keywords if word.arg == "name"] + node.args[:1]
        for name in names:
            if isinstance(name, ast.Constant) and METRIC.fullmatch(str(name.value)):
                found |= {name.value + end for end in SERIES.get(node.func.id, ())}
    return found


@cache
def exported() -> set[str]:
    """By SGLang's server and by ours."""
    origin = importlib.util.find_spec("sglang").submodule_search_locations[0]
    sources = [
        *(Path(origin) / "srt" / "observability").glob("*.py"),
        Path(origin) / "srt" / "utils" / "common.py",
        ROOT / "dspark" / "host" / "metrics.py",
    ]
    return set().union(*(series_of(source.read_text()) for source in sources))


def expressions() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


def asked(words: Any) -> set[str]:
    """Metrics that a part of the dashboard names, with their colon."""
    return {":".join(parts) for parts in ASKED.findall(json.dumps(words))}


def test_series_are_read_from_declarations():
    source = 'Gauge(name="sglang:a")\nHistogram("dspark:b", "words")\nprint("sglang:c")\n'
    assert series_of(source) == {"sglang:a", "dspark:b_bucket", "dspark:b_sum", "dspark:b_count"}


def test_every_metric_is_exported():
    assert asked(DASHBOARD) - exported() == set()
    assert len(asked(DASHBOARD)) > 20
    assert not METRIC.search(json.dumps(DASHBOARD))  # the name of one library's version only


def test_every_counter_of_this_package_is_shown():
    ours = {name for name in exported() if name.startswith("dspark:")}
    assert ours == {
        "dspark:verify_steps_total",
        "dspark:verify_rows_total",
        "dspark:drafts_accepted_total",
    }
    assert ours <= asked(PANELS)


@pytest.mark.parametrize("expression", expressions())
def test_counters_are_rates_and_every_figure_is_of_the_chosen_servers(expression):
    selectors = SELECTOR.findall(expression)
    assert selectors
    for rated, inside, span in selectors:
        counts = CHOSEN.match(inside)[1].endswith(("_total", "_bucket"))
        assert [bool(rated), bool(span)] == [counts, counts]


def test_every_panel_says_what_it_shows_and_asks_the_chosen_prometheus():
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == [
        "datasource",
        "instance",
    ]
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert [panel["datasource"], *(t["datasource"] for t in panel["targets"])] == [chosen] * (
            1 + len(panel["targets"])
        )
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)


def test_no_panel_covers_another():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    for place in places:
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
    for one, other in combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


@pytest.mark.parametrize("expression", expressions())
def test_brackets_close(expression):
    closing = {")": "(", "}": "{", "]": "["}
    open_ones: list[str] = []
    for character in re.sub(r'"[^"]*"', "", expression):
        if character in closing.values():
            open_ones.append(character)
        elif character in closing:
            assert open_ones.pop() == closing[character]
    assert open_ones == []
