"""Stand-in packages: what they answer, and that a real package is never shadowed."""

import importlib
import sys

import pytest
import torch

from dspark import standins


@pytest.fixture
def fake_path(monkeypatch):
    """A finder for the name `absent_pkg` only, with nothing left behind in sys.modules."""
    finder = standins.StandinFinder(frozenset({"absent_pkg"}))
    monkeypatch.setitem(standins.VERSIONS, "absent_pkg", "1.2.3")
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == "absent_pkg"]:
        del sys.modules[name]


@pytest.mark.usefixtures("fake_path")
def test_names_can_be_imported_but_not_called():
    module = importlib.import_module("absent_pkg.deep.inside")
    assert importlib.import_module("absent_pkg").__version__ == "1.2.3"
    operation = module.some_op.variant
    with pytest.raises(NotImplementedError, match=r"absent_pkg\.deep\.inside\.some_op\.variant"):
        operation(1, key=2)
    with pytest.raises(AttributeError):
        _ = module.__wrapped__


def test_only_missing_packages_are_replaced():
    assert standins.absent(("json", "no_such_package_at_all")) == {"no_such_package_at_all"}


def test_nothing_is_installed_outside_cpu_mode(monkeypatch):
    monkeypatch.setenv(standins.CPU_ENGINE, "0")
    monkeypatch.setattr(standins, "absent", lambda: frozenset({"sgl_kernel"}))
    before = list(sys.meta_path)
    standins.install_if_cpu()
    assert sys.meta_path == before


def test_slots_are_written_request_after_request():
    table = torch.zeros(4, 6, dtype=torch.int32)
    standins.assign_req_to_token_pool_cpu(
        torch.tensor([2, 1, 3]),
        table,
        torch.tensor([1, 0, 4]),
        torch.tensor([4, 2, 4]),
        torch.tensor([10, 11, 12, 20, 21]),
        6,
    )
    assert table.tolist() == [
        [0, 0, 0, 0, 0, 0],
        [20, 21, 0, 0, 0, 0],
        [0, 10, 11, 12, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]
