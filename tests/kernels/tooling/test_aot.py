"""The GPU-less compile gate: it passes good kernels and catches each kind of bad one."""

import json

import pytest
import triton
import triton.language as tl

from dspark.kernels.tooling import aot
from dspark.kernels.tooling.entries import AotEntry


@triton.jit
def _scale(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@triton.jit
def _square(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    a = tl.load(x + at)
    tl.store(out + at, tl.dot(a, a))


def scale(**changes) -> AotEntry:
    entry = AotEntry(
        name="test.scale",
        fn=_scale,
        signature={"x": "*fp32", "out": "*fp32", "n": "i32"},
        constexprs={"BLOCK": 256},
        divisible=("x", "out"),
        num_warps=4,
        num_stages=1,
        expects_mma=False,
        hot=True,
    )
    return entry._replace(**changes)


def square(n: int, warps: int, **changes) -> AotEntry:
    entry = AotEntry(
        name="test.square",
        fn=_square,
        signature={"x": "*bf16", "out": "*fp32"},
        constexprs={"N": n},
        divisible=("x", "out"),
        num_warps=warps,
        num_stages=1,
        expects_mma=True,
        hot=True,
    )
    return entry._replace(**changes)


def test_contraction_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    assert "may contract products" in aot.build(scale()).problems[0]


def test_good_kernels_pass():
    result = aot.build(scale())
    assert result.problems == []
    assert result.resources.shared == 0
    assert 0 < result.resources.registers < 64
    assert aot.build(square(32, 4)).problems == []


@pytest.mark.parametrize("capability", aot.CAPABILITIES)
def test_an_entry_compiles_for_every_capability_that_is_served(capability):
    result = aot.build(square(32, 4), capability)
    assert result.problems == []
    assert result.resources.registers > 0


def test_code_for_another_capability_is_told_apart():
    fits = aot.Resources(shared=0, registers=9, spill=0)
    found = aot.problems_of(square(32, 4), ".target sm_89\n mma.sync", fits, 120)
    assert found == ["is not code for sm_120a"]


def test_the_checks_see_each_defect():
    good = ".target sm_89\n mma.sync.aligned"
    fits = aot.Resources(shared=aot.MAX_SHARED_BYTES, registers=255, spill=0)
    entry = square(32, 4)
    assert aot.problems_of(entry, good, fits) == []
    cases = [
        (entry, good, fits._replace(shared=fits.shared + 1), "shared memory"),
        (entry, good, fits._replace(spill=4), "spills 4 B"),
        (entry, good.replace("89", "90a"), fits, "not code for sm_89"),
        (entry, good.replace("mma.sync", "fma.rn"), fits, "tensor cores"),
    ]
    twice = "\n cvt.rn.satfinite.e4m3x2.f16x2"
    cases.append((entry, good + twice, fits, "by way of fp16"))
    cases += [(entry, f"{good}\n {word}.x", fits, word) for word in aot.FORBIDDEN]
    for candidate, ptx, resources, sentence in cases:
        problems = aot.problems_of(candidate, ptx, resources)
        assert len(problems) == 1, problems
        assert sentence in problems[0]
    assert aot.problems_of(entry._replace(hot=False), good, fits._replace(spill=4)) == []


def test_a_kernel_that_spills_is_caught():
    assert "spills" in aot.build(square(128, 1)).problems[0]


def test_a_kernel_that_does_not_compile_is_named_not_raised():
    built = aot.build_all([scale(signature={"x": "*fp32", "out": "*fp99", "n": "i32"})], jobs=1)
    assert "does not compile" in built["test.scale"].problems[0]


def test_drift_from_the_golden_table():
    built = {"a": aot.Build(aot.Resources(1, 2, 0), [])}
    same = {"a": {"shared": 1, "registers": 2, "spill": 0}}
    table = {"triton": triton.__version__, "entries": same}
    assert aot.drift(built, table, every_entry=True) == []
    other = {**table, "entries": {"a": {**same["a"], "registers": 3}, "gone": same["a"]}}
    lines = aot.drift(built, other, every_entry=True)
    assert len(lines) == 2
    assert "golden" in lines[0]
    assert "no longer built" in lines[1]
    assert len(aot.drift(built, other, every_entry=False)) == 1
    assert aot.drift(built, {**other, "triton": "0"}, every_entry=True) == []


def test_fast_takes_each_kernel_once():
    entries = [scale(), scale(name="b"), square(32, 4)]
    assert [e.name for e in aot.first_of_each_kernel(entries)] == ["test.scale", "test.square"]


def test_update_of_a_subset_is_refused(capsys):
    with pytest.raises(SystemExit):
        aot.main(["--update", "--fast"])
    assert "every entry" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        aot.main(["--update", "--capability", "120"])
    assert "the golden table is of sm_89" in capsys.readouterr().err


@pytest.mark.deep
@pytest.mark.parametrize("capability", ["90", "120"])
def test_every_kernel_compiles_for_the_others(capability, capsys):
    """Spilled registers cost time on a card that is not tuned for, nothing else."""
    status = aot.main(["--check", "--capability", capability])
    assert status == 0, capsys.readouterr().err


@pytest.mark.deep
def test_the_golden_table_holds(capsys):
    assert aot.main(["--check"]) == 0, capsys.readouterr().err


def test_the_golden_table_is_sorted_json():
    entries = json.loads(aot.GOLDEN.read_text())["entries"]
    assert list(entries) == sorted(entries)
