"""The rooms of the sources and which of them may know which: imports point to the left only.

kernels <- state <- target <- speculation <- host <- commands, plugin <- bench. All imports count,
those inside functions too.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {  # package -> folder, as pyproject.toml maps them
    "dspark": "dspark",
    "dspark.kernels": "kernels",
    "dspark.state": "state",
    "dspark.target": "target",
    "dspark.bench": "bench",
}
# From left to right. Modules that no room is named for (`dspark.errors`) stand left of all.
ROOMS = (
    ("dspark.errors", "dspark.options", "dspark.standins", "dspark.embedded"),
    ("dspark.kernels",),
    ("dspark.state",),
    ("dspark.target",),
    ("dspark.speculation",),
    ("dspark.host",),
    ("dspark.commands", "dspark.plugin", "dspark.cli"),
    ("dspark.bench",),
)
# The room that meets SGLang, what hands it over, and a bench that measures SGLang's own ops.
MEET_SGLANG = ("dspark.host", "dspark.plugin", "dspark.bench.stock_ops")


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            found[name] = file
    return found


def imported(tree: ast.AST) -> set[str]:
    """Full names of everything a file imports, wherever the import stands."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@cache
def imports(module: str) -> frozenset[str]:
    return frozenset(imported(ast.parse(modules()[module].read_text())))


def module_of(name: str) -> str | None:
    """The module of ours that an import of `name` runs: itself, or the one that holds it."""
    for candidate in (name, name.rpartition(".")[0]):
        if candidate in modules():
            return candidate
    return None


def inner_imports(module: str) -> set[str]:
    found = {module_of(name) for name in imports(module)}
    return {name for name in found if name is not None}


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def room_of(module: str) -> int:
    """Place in ROOMS; the empty package file `dspark` stands left of all."""
    for place, packages in enumerate(ROOMS):
        if any(is_in(module, package) for package in packages):
            return place
    assert module == "dspark", f"{module} is in no room"
    return 0


def test_every_module_has_a_room():
    assert {room_of(module) for module in modules()} == set(range(len(ROOMS)))
    assert len(modules()) > 100


def test_imports_point_to_the_left():
    wrong = [
        f"{module} imports {other}"
        for module in modules()
        for other in inner_imports(module)
        if room_of(other) > room_of(module)
    ]
    assert wrong == []


def test_only_the_host_meets_sglang():
    strangers = [
        module
        for module in modules()
        if any(is_in(name, "sglang") for name in imports(module))
        and not any(is_in(module, package) for package in MEET_SGLANG)
    ]
    assert strangers == []


def cycle(edges: dict[str, set[str]]) -> list[str] | None:
    """Modules that import each other in a circle, first = last; None if there is no circle."""
    done: set[str] = set()

    def follow(path: list[str]) -> list[str] | None:
        for other in sorted(edges[path[-1]]):
            if other in path:
                return [*path[path.index(other) :], other]
            if other not in done and (found := follow([*path, other])):
                return found
        done.add(path[-1])
        return None

    for module in sorted(edges):
        if module not in done and (found := follow([module])):
            return found
    return None


def test_nothing_imports_in_a_circle():
    edges = {module: inner_imports(module) - {module} for module in modules()}
    assert cycle(edges) is None


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, None),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
    ],
)
def test_a_circle_is_found(edges, expected):
    assert cycle(edges) == expected


def test_imports_inside_functions_count():
    tree = ast.parse("def f():\n    from dspark.host import worker\n    import dspark.plugin\n")
    assert imported(tree) == {"dspark.host.worker", "dspark.plugin"}
