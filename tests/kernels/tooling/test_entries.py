"""Entries made from the launches that example calls would make on a GPU."""

import pytest
import torch
import triton
import triton.language as tl

from dspark.kernels.common.launch_table import FAMILIES
from dspark.kernels.tooling import entries
from dspark.kernels.tooling.entries import Example, meta


@triton.jit
def _add(x, y, out, n, m, alpha, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * alpha + m, mask=i < n)


def add(n: int, m: int = 7, alpha: float = 0.5) -> None:
    x = meta(torch.bfloat16, n)
    _add[(1,)](x, None, torch.empty_like(x), n, m, alpha, BLOCK=64, num_warps=2, num_stages=1)


def test_a_launch_is_seen_as_a_gpu_would_be_given_it():
    (launch,) = entries.launches_of(lambda: add(48))
    assert launch.kernel is _add
    assert launch.signature == {
        "x": "*bf16",
        "out": "*bf16",
        "n": "i32",
        "m": "i32",
        "alpha": "fp32",
    }
    assert launch.constexprs == {"y": None, "BLOCK": 64}
    assert launch.divisible == ("x", "out", "n")
    assert (launch.num_warps, launch.num_stages) == (2, 1)


def test_a_one_is_part_of_the_binary():
    (launch,) = entries.launches_of(lambda: add(48, m=1))
    assert launch.constexprs == {"y": None, "m": 1, "BLOCK": 64}
    assert "m" not in launch.signature


def test_launching_works_again_after_a_call_that_raises():
    run = triton.runtime.jit.JITFunction.run
    with pytest.raises(ZeroDivisionError):
        entries.launches_of(lambda: 1 / 0)
    assert triton.runtime.jit.JITFunction.run is run


def test_an_example_names_which_launch_it_means(monkeypatch):
    def twice():
        add(48)
        add(49)

    module = type("examples", (), {"EXAMPLES": [Example("add[second]", _add, twice, launch=1)]})
    monkeypatch.setattr(entries, "_examples", lambda family: module.EXAMPLES)
    (entry,) = entries.aot_entries("accept")
    assert entry.name == "accept.add[second]"
    assert "n" not in entry.divisible
    module.EXAMPLES.append(Example("add[third]", _add, twice, launch=2))
    with pytest.raises(ValueError, match=r"accept\.add\[third\] launches its kernel 2 times"):
        entries.aot_entries("accept")
    module.EXAMPLES[1] = module.EXAMPLES[0]
    with pytest.raises(ValueError, match=r"share a name: accept\.add\[second\]"):
        entries.aot_entries("accept")


def test_every_family_has_entries():
    found = {entry.name.partition(".")[0] for entry in entries.aot_entries()}
    assert found == set(FAMILIES)


def test_an_unknown_family_is_named():
    with pytest.raises(ValueError, match="sorting"):
        entries.aot_entries("sorting")
