"""Every place where this package meets SGLang is named, exists, and is checked for change."""

import ast
import functools
import importlib.metadata
from pathlib import Path

import pytest

import dspark
from dspark import plugin
from dspark.host import seams
from dspark.host.seams import Seam, Use


def test_installed_sglang_is_as_expected():
    assert seams.find_version_fault() is None
    assert seams.verify() == []


def test_hooks_and_seams_name_the_same_targets():
    assert {s.target for s in seams.SEAMS if s.use is Use.HOOK} == set(plugin.HOOKS)
    assert len({s.target for s in seams.SEAMS}) == len(seams.SEAMS)


@pytest.mark.parametrize(
    ("seam", "line"),
    [
        (Seam("utils.common.no_such_name", Use.CALL), "no_such_name"),
        (Seam("no_such_module.thing", Use.BASE), "no_such_module"),
        (Seam("utils.common.support_triton", Use.HOOK, ("name",)), "takes ('backend',)"),
        (Seam("utils.common.support_triton", Use.HOOK, ("backend", "x")), "expected"),
        (Seam("utils.common.support_triton", Use.CALL, ("backend", "x")), "lacks the parameters x"),
    ],
)
def test_one_line_names_what_changed(seam, line):
    (fault,) = seams.verify([seam])
    assert seam.path in fault
    assert line in fault
    assert "\n" not in fault


def test_other_versions_are_named(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.5.18")
    assert "found 0.5.18" in seams.find_version_fault()

    def absent(_):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert "no SGLang at all" in seams.find_version_fault()


def test_a_hook_is_found_below_another_plugins_wrapper():
    def ours(original, value):
        return original(value)

    def stock(value):
        return value

    def wrap(function, hook):
        @functools.wraps(function)
        def wrapper(*args):
            return hook(function, *args)

        return wrapper

    theirs = wrap(wrap(stock, ours), lambda original, value: original(value))
    assert seams.is_wrapped_by(theirs, ours)
    assert not seams.is_wrapped_by(wrap(stock, print), ours)
    assert not seams.is_wrapped_by(stock, ours)


def imported_from_sglang() -> set[str]:
    """Every name below `sglang.srt.` that a module of this package imports."""
    names = set()
    for file in Path(dspark.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    names.discard("sglang.launch_server.run_server")  # public, and not below `sglang.srt`
    return {name.removeprefix("sglang.srt.") for name in names}


def test_nothing_of_sglang_is_used_that_is_not_listed():
    listed = {seam.target for seam in seams.SEAMS}
    unlisted = {
        name
        for name in imported_from_sglang()
        if not any(target == name or target.startswith(f"{name}.") for target in listed)
    }
    assert unlisted == set(), "add these to host/seams.py with the parameters they are used with"
