"""The README's table of environment variables holds what the sources read, no more and no less."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("dspark", "target", "kernels", "state", "bench")


def variables_in_sources() -> set[str]:
    """String literals that are a variable's name and nothing else."""
    names = set()
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names |= set(re.findall(r"\A(?:DSPARK|STATE)_[A-Z_]+\Z", node.value))
    return names


def variables_in_readme() -> list[str]:
    text = (ROOT / "README.md").read_text()
    section = text.partition("## Environment variables")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([A-Z_]+)` \|", section, re.MULTILINE)


def test_every_variable_is_documented_once_and_none_besides():
    documented = variables_in_readme()
    assert sorted(documented) == sorted(variables_in_sources())
    assert len(documented) >= 12
