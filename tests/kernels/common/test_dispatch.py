"""One op of two implementations: which runs, what is checked, and that every op has both."""

import importlib
import inspect
import sys
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from dspark.kernels.common import dispatch
from dspark.kernels.common.launch_table import FAMILIES


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def scaled(x, factor=2.0, *, offset=0.0):
    """The specification."""
    return ("reference", factor, offset)


@pytest.fixture
def on_gpu(monkeypatch):
    """Every tensor counts as one of a GPU; the twin of `scaled` says that it ran."""
    monkeypatch.setattr(dispatch, "use_triton", lambda x: isinstance(x, torch.Tensor))
    twin = ModuleType("family.kernel")
    twin.scaled = lambda x, factor=2.0, *, offset=0.0: ("kernel", factor, offset)
    monkeypatch.setitem(sys.modules, "family", ModuleType("family"))
    monkeypatch.setitem(sys.modules, "family.kernel", twin)
    monkeypatch.setattr(scaled, "__module__", "family.reference")


def test_a_cpu_tensor_takes_the_reference_and_imports_no_kernel(monkeypatch):
    monkeypatch.setattr(scaled, "__module__", "no_such_family.reference")
    assert dispatch.op(scaled)(torch.zeros(1), 3.0) == ("reference", 3.0, 0.0)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    "x", [torch.zeros(1), [torch.zeros(1)], Pair(torch.zeros(1), torch.zeros(1))]
)
def test_the_first_tensor_of_the_first_argument_decides(x):
    run = dispatch.op(scaled)
    assert run(x, 3.0, offset=1.0) == ("kernel", 3.0, 1.0)
    assert run(factor=4.0, x=x) == ("kernel", 4.0, 0.0)


@pytest.mark.usefixtures("on_gpu")
def test_the_reference_can_be_asked_for_by_the_arguments():
    run = dispatch.op(scaled, reference_if=lambda factor: factor == 1.0)
    assert run(torch.zeros(1), 1.0)[0] == "reference"
    assert run(torch.zeros(1))[0] == "kernel"


def test_the_environment_forces_the_reference(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    monkeypatch.setattr(dispatch, "settle_compiler", lambda: None)
    assert dispatch.use_triton(torch.zeros(1))
    monkeypatch.setenv("DSPARK_KERNELS", "reference")
    assert not dispatch.use_triton(torch.zeros(1))


def test_a_check_sees_the_arguments_that_it_names():
    seen = []
    run = dispatch.op(scaled, check=lambda offset, factor: seen.append((offset, factor)))
    run(torch.zeros(1))
    run(torch.zeros(1), 3.0, offset=5.0)
    run(offset=6.0, x=torch.zeros(1))
    assert seen == [(0.0, 2.0), (5.0, 3.0), (6.0, 2.0)]


def test_a_check_refuses_before_anything_runs():
    def check(factor):
        raise ValueError(f"factor {factor}")

    with pytest.raises(ValueError, match=r"factor 3\.0"):
        dispatch.op(scaled, check=check)(torch.zeros(1), 3.0)


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "missing .* 'x'"),
        ((1, 2, 3), {}, "positional"),
        ((1,), {"x": 2}, "multiple values"),
        ((1,), {"size": 2}, "size"),
    ],
)
def test_wrong_arguments_raise_as_those_of_any_function(args, kwargs, said):
    tensors = [torch.zeros(1)] * len(args)
    with pytest.raises(TypeError, match=said):
        dispatch.op(scaled, check=lambda x: None)(*tensors, **kwargs)


def ops_of(family: str) -> dict[str, object]:
    """The public ops of a family: functions that stand for one of its reference module."""
    module = importlib.import_module(f"dspark.kernels.{family}")
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and hasattr(value, "__wrapped__")
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_op_has_a_twin_with_its_parameters(family):
    ops = ops_of(family)
    kernel = importlib.import_module(f"dspark.kernels.{family}.kernel")
    assert ops
    for name, function in ops.items():
        assert function.__wrapped__.__module__ == f"dspark.kernels.{family}.reference"
        assert function.__wrapped__.__name__ == name
        assert function.__doc__, f"{family}.{name} does not say what it does"
        assert shape_of(getattr(kernel, name)) == shape_of(function), f"{family}.{name}"


def shape_of(function) -> list[tuple]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
