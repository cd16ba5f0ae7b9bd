"""What is packed: a source distribution that can be tested, a wheel that only serves."""

import ast
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("dspark", "kernels", "state", "target", "bench", "tests", "requirements")
FILES = (
    "pyproject.toml",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "README.zh.md",
    "LICENSE",
    "NOTICE",
)
BUILD = """
from setuptools import build_meta
build_meta.build_sdist("packed")
build_meta.build_wheel("packed")
"""
SGLANG_BRINGS = {
    "sglang",
    "xgrammar",
    "fastapi",
    "starlette",
    "pydantic",
    "orjson",
    "jinja2",
    "prometheus_client",
}
OPTIONAL = {"aiohttp", "matplotlib"}  # of the extra `bench`


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """Folder with both distributions, built from a copy."""
    copy = tmp_path_factory.mktemp("source")
    for part in PARTS:
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, copy)
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return copy / "packed"


def test_the_source_distribution_can_be_built_and_tested(packed):
    (file,) = packed.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {
        str(path.relative_to(ROOT))
        for part in PARTS
        for path in (ROOT / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sources - names == set()
    assert set(FILES) - names == set()


def test_the_wheel_holds_all_that_serves_and_nothing_that_trains_or_tests(packed):
    (file,) = packed.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        names = set(archive.namelist())
    served = {
        str(path.relative_to(ROOT) if part == "dspark" else "dspark" / path.relative_to(ROOT))
        for part in ("dspark", "kernels", "state", "target", "bench")
        for path in (ROOT / part).rglob("*.py")
        if "train_embedded" not in path.parts
    }
    assert {name for name in names if name.endswith(".py")} == served
    for needed in (
        "embedded/checkpoint/config.json",
        "embedded/prompts/prose.txt",
        "bench/page/page.html.j2",
    ):
        assert f"dspark/{needed}" in names
    assert not [name for name in names if "train_embedded" in name or "results" in name]


def imported(file: Path) -> set[str]:
    """First names of the modules that a file imports absolutely."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {line.partition(">")[0] for line in project["dependencies"]}
    needed = {
        name
        for part in ("dspark", "kernels", "state", "target", "bench")
        for file in (ROOT / part).rglob("*.py")
        if "train_embedded" not in file.parts
        for name in imported(file)
    }
    outside = needed - set(sys.stdlib_module_names) - {"dspark"}
    assert outside - SGLANG_BRINGS - OPTIONAL == declared
