"""Which files of this package a family's code is made of: its own, and all that they import."""

import ast
import hashlib
from pathlib import Path

PACKAGE = "dspark.kernels"
ROOT = Path(__file__).parents[1]


def source_sha256(family: str) -> str:
    """Hash of a family's sources, borrowed ones included: a tuned configuration is valid for these
    only. Its examples do not count, which only say what is compiled ahead of time.
    """
    return hashlib.sha256(b"".join(file.read_bytes() for file in sources_of(family))).hexdigest()


def sources_of(family: str) -> list[Path]:
    """The family's own modules and, again and again, what is imported: sorted."""
    waiting = [file for file in (ROOT / family).glob("*.py") if file.name != "examples.py"]
    found: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += imported_by(file)
    return sorted(found)


def imported_by(file: Path) -> set[Path]:
    """Files of this package that `file` imports anywhere in its text, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` reads the module, `from module import value` the latter.
            names |= {
                inner if _file_of(inner := f"{node.module}.{alias.name}") else node.module
                for alias in node.names
            }
    return {found for name in names for found in _file_of(name)}


def _file_of(module: str) -> tuple[Path, ...]:
    """The module's file, or nothing for what is not of this package."""
    if not f"{module}.".startswith(f"{PACKAGE}."):
        return ()
    place = ROOT.joinpath(*module.removeprefix(PACKAGE).strip(".").split("."))
    candidates = (place.with_suffix(".py"), place / "__init__.py")
    return tuple(file for file in candidates if file.is_file())
