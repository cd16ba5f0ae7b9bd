"""Every place where this package meets SGLang is named, exists, and is checked for change."""

import ast
import functools
import importlib.metadata
import re
from pathlib import Path

import pytest
import sglang

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
    assert unlisted == set(), "add these to host/seam_lists/ with the parameters they are used with"


# Read where something is switched on that the worker does not offer, or with a default.
NOT_OFFERED = {
    "get_confidence_budget_prepare",  # SGLang's own ragged verify
    "prepare_for_kv_cache_release",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "draft_model_runner",
    "_draft_worker",
}


def read_from_worker() -> set[str]:
    """Attributes that SGLang's scheduler and what it consists of read from the worker."""
    worker = r"\b(?:self\.)?(?:scheduler\.)?(?:draft_worker|model_worker)"
    read = rf"{worker}\.(\w+)"
    asked = rf"(?:get|has)attr\(\s*(?:self\.)?{worker},\s*\"(\w+)\""
    passed_on = r"worker = self\.draft_worker or self\.tp_worker\s+.*worker\.(\w+)\("
    names = set()
    sources = Path(sglang.__file__).parent / "srt"
    for room in ("managers", "mem_cache"):
        for file in (sources / room).rglob("*.py"):
            text = file.read_text()
            for pattern in (read, asked, passed_on):
                names |= set(re.findall(pattern, text))
    # The draft's own worker has this, where it is asked for at all.
    return names - {"draft_runner", "draft_runner_list"}


def test_the_worker_has_what_the_scheduler_reads():
    from dspark.host.worker import DSparkWorker

    # `target_worker` is read under the name `tp_worker`.
    assert read_from_worker() - NOT_OFFERED == seams.READ_FROM_WORKER - {"target_worker"}
    lacking = {name for name in seams.READ_FROM_WORKER if not hasattr(DSparkWorker, name)}
    assert lacking == set()
