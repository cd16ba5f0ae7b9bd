"""What a family's code is made of: a borrowed change counts, and nobody borrows in a circle."""

import json
import shutil
from graphlib import TopologicalSorter

import pytest

from dspark.kernels.common import launch_table, sources
from dspark.kernels.common.launch_table import FAMILIES
from dspark.kernels.linear import kernel as linear_kernel

# A family may use another one's ops; these are all that do.
USES = {
    ("accept", "collective"),
    ("draft", "collective"),
    ("draft", "linear"),
    ("draft", "sampling"),  # a draft guesses what the target will choose
}


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The sources in a folder where a change can be planted."""
    root = tmp_path / "kernels"
    shutil.copytree(sources.ROOT, root)
    monkeypatch.setattr(sources, "ROOT", root)
    return root


def test_a_change_of_borrowed_device_code_changes_the_hash_of_all_who_borrow(copy):
    before = {family: sources.source_sha256(family) for family in FAMILIES}
    borrowed = copy / "common" / "fp8_kernel.py"
    borrowed.write_text(borrowed.read_text() + "\n# changed\n")
    changed = {family for family in FAMILIES if sources.source_sha256(family) != before[family]}
    # Attention reads the pages that the others write: its module holds both directions.
    assert {"linear", "qkv", "compress", "indexer", "attention"} <= changed
    assert not changed & {"schedule", "state", "step", "accept", "collective"}


def test_a_winner_tuned_for_other_borrowed_code_is_refused(copy, tmp_path, monkeypatch):
    monkeypatch.setattr(linear_kernel, "LAUNCH", dict(linear_kernel.LAUNCH))
    winner = tmp_path / "winner.json"
    content = {
        "schema": 1,
        "op": "linear.act_quant",
        "sm": 89,
        "source_sha256": sources.source_sha256("linear"),
        "config": {"num_warps": 2, "num_stages": 1, "constexprs": {"BM": 4}},
    }
    winner.write_text(json.dumps(content))
    assert launch_table.load_winner(winner, sm=89)
    borrowed = copy / "common" / "swiglu_kernel.py"
    borrowed.write_text(borrowed.read_text().replace("tl.minimum", "tl.maximum"))
    with pytest.warns(UserWarning, match="the kernel has changed since"):
        assert not launch_table.load_winner(winner, sm=89)


def test_examples_do_not_count(copy):
    before = sources.source_sha256("linear")
    examples = copy / "linear" / "examples.py"
    examples.write_text(examples.read_text() + "\n# changed\n")
    assert sources.source_sha256("linear") == before


def test_no_import_closes_a_circle():
    """Imports inside functions count; `prepare` raises CycleError, which names the circle."""
    files = sources.ROOT.rglob("*.py")
    TopologicalSorter({file: sources.imported_by(file) for file in files}).prepare()


def test_families_use_each_other_seldom_and_never_their_kernels():
    uses = set()
    for family in FAMILIES:
        for file in (sources.ROOT / family).glob("*.py"):
            for imported in sources.imported_by(file):
                owner = imported.relative_to(sources.ROOT).parts[0]
                if owner in FAMILIES and owner != family:
                    uses.add((family, owner))
                    assert imported.name != "kernel.py", f"{file} imports {imported}"
    assert uses == USES
