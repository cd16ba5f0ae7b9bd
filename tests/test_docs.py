"""README and docs/ lead somewhere: every link has its target, every command line parses."""

import argparse
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from dspark import cli, options

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").rglob("*.md")])
CHINESE = sorted((ROOT / "docs" / "zh").glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEADING = r"^#+ "
FENCED = r"^```.*?^```$"
LIST_ITEM = r"^(?:-|\d+\.) "
TABLE_ROW = r"^\|"
CODE = re.compile(r"`[^`\n]+`")
FIGURE = re.compile(r"\d(?:[\d,.]*\d)?")
PYTHON_MODULE = re.compile(r"python -m (dspark[\w.]+)")


class Parsed(Exception):
    """Raised where a command has parsed its arguments and would begin its work."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    dead = []
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    return dead


def command_lines(text: str) -> list[list[str]]:
    """The words behind `dspark` of every such line in blocks of shell."""
    found = []
    for block in SHELL.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                del words[0]
            if words and words[0].rpartition("/")[2] == "dspark":
                found.append(words[1:])
    return found


SHOWN = sorted({tuple(line) for page in PAGES for line in command_lines(page.read_text())})


@pytest.fixture
def stop_when_parsed(monkeypatch):
    """No command does more than parse; words it does not know end it as ever."""
    all_words, some_words = (
        argparse.ArgumentParser.parse_args,
        argparse.ArgumentParser.parse_known_args,
    )

    def parse_args(self, args=None, namespace=None):
        with monkeypatch.context() as inner:
            inner.setattr(argparse.ArgumentParser, "parse_known_args", some_words)
            all_words(self, args, namespace)
        raise Parsed

    def parse_known_args(self, args=None, namespace=None):
        some_words(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_has_its_target(page):
    assert dead_links(page) == []


def test_a_dead_link_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A b\n[there](page.md#a-b) [not](page.md#c) [gone](x.md) [web](https://x.y)")
    assert dead_links(page) == ["page.md#c", "x.md"]


def test_command_lines_are_found_behind_variables_and_over_lines():
    text = '```sh\nA=1 dspark serve \\\n  --x "a b"  # why\nls\n.venv/bin/dspark doctor\n```\n'
    assert command_lines(text) == [["serve", "--x", "a b"], ["doctor"]]


def test_enough_commands_are_shown():
    assert {words[0] for words in SHOWN} >= {"serve", "plan", "doctor", "bench", "make-checkpoint"}


@pytest.mark.parametrize("words", [w for w in SHOWN if w[0] != "serve"], ids=" ".join)
def test_every_command_line_parses(words, stop_when_parsed):
    with pytest.raises(Parsed):
        cli.main(list(words))


@pytest.mark.parametrize("words", [w[1:] for w in SHOWN if w[0] == "serve"], ids=" ".join)
def test_every_server_command_line_parses(words, server_flags, monkeypatch):
    monkeypatch.setattr(options, "_flags_given", {})
    for option in options.OPTIONS:
        monkeypatch.setenv(option.variable, "")  # so that what the flags set is undone
    assert "--model-path" in words
    server_flags.parse_args(list(words))


def test_a_server_flag_that_does_not_exist_is_noticed(server_flags):
    with pytest.raises(SystemExit):
        server_flags.parse_args(["--model-path", "DIR", "--no-such-flag"])


@pytest.mark.parametrize("words", [["plan", "--no-such-flag"], ["bench", "exact"]], ids=" ".join)
def test_a_line_that_does_not_parse_is_noticed(words, stop_when_parsed):
    with pytest.raises(SystemExit):
        cli.main(words)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_modules_that_are_named_are_there(page):
    for module in PYTHON_MODULE.findall(page.read_text()):
        assert importlib.util.find_spec(module.rstrip(".")), module


def test_the_user_half_is_there_in_chinese():
    names = {page.stem for page in CHINESE}
    assert names == {
        "flags",
        "memory",
        "requests",
        "security",
        "tensor-parallel",
        "troubleshooting",
        "watching",
    }


def test_the_chinese_readme_keeps_step():
    """Same headings' levels, commands, figures and links as the English one, in the same order."""
    english, chinese = ((ROOT / name).read_text() for name in ("README.md", "README.zh.md"))
    for pattern in (HEADING, FENCED, r"^<!-- bench:.*?^<!-- /bench -->$"):
        found = [re.findall(pattern, text, re.M | re.S) for text in (english, chinese)]
        assert found[0] == found[1]
    # the first leads to the other language; some pages have a translation
    links = [sorted(LINK.findall(text)[1:]) for text in (english, chinese)]
    assert links[0] == sorted(link.replace("docs/zh/", "docs/") for link in links[1])
    assert not [link for link in links[1] if (ROOT / link.replace("docs/", "docs/zh/")).exists()]


@pytest.mark.parametrize("page", CHINESE, ids=name_of)
def test_a_chinese_page_keeps_step(page):
    """Headings' levels, blocks, words of code, figures, links, tables' and lists' lines."""
    english, chinese = (ROOT / "docs" / page.name).read_text(), page.read_text()
    for pattern in (HEADING, FENCED, LIST_ITEM, TABLE_ROW):
        found = [re.findall(pattern, text, re.M | re.S) for text in (english, chinese)]
        assert found[0] == found[1]
    texts = [re.sub(FENCED, "", text, flags=re.M | re.S) for text in (english, chinese)]
    assert sorted(CODE.findall(texts[0])) == sorted(CODE.findall(texts[1]))
    figures = [sorted(FIGURE.findall(CODE.sub("", text))) for text in texts]
    assert figures[0] == figures[1]
    targets = [{Path(link).name for link in LINK.findall(text)} for text in texts]
    assert targets[0] == targets[1]
    assert f"English | [中文](zh/{page.name})\n" in english
    assert f"[English](../{page.name}) | 中文\n" in chinese


@pytest.mark.parametrize("page", CHINESE, ids=name_of)
def test_a_chinese_page_leads_to_chinese_pages(page):
    known = {f"../{other.name}" for other in CHINESE if other != page}
    assert known.isdisjoint(LINK.findall(page.read_text()))


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_demo_in_readme_is_the_start_of_its_record():
    shown = re.findall(r"^```text\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert [(ROOT / "docs" / "demo.txt").read_text().startswith(text) for text in shown] == [True]
    assert "SAME TOKENS" in shown[0]
