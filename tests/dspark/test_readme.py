"""The table of options holds the variables that the sources read, and docs/flags.md shows it."""

import ast
import re
from pathlib import Path

from dspark import options

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "dspark" / "options.py"
PACKAGES = ("dspark", "target", "kernels", "state", "bench")


def variables_in_sources() -> set[str]:
    """String literals that are a variable's name and nothing else."""
    names = set()
    for package in PACKAGES:
        for file in set((ROOT / package).rglob("*.py")) - {TABLE}:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names |= set(re.findall(r"\A(?:DSPARK|STATE)_[A-Z_]+\Z", node.value))
    return names


def test_every_variable_that_is_read_is_in_the_table_and_none_besides():
    listed = [option.variable for option in options.OPTIONS]
    assert sorted(listed) == sorted(variables_in_sources())
    assert len(listed) >= 12


def test_the_page_of_flags_names_every_option():
    section = (ROOT / "docs" / "flags.md").read_text()
    for option in options.OPTIONS:
        assert f"| `{option.variable}` |" in section
        assert option.flag is None or f"| `{option.flag}` |" in section
