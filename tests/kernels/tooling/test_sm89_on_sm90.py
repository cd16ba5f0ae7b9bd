"""Hopper as a stand-in for Ada: the code generator emits Ada instructions for an sm_90 device."""

import pytest
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dspark.kernels.common.dispatch import COMPILER_SETTINGS
from dspark.kernels.tooling import sm89_on_sm90
from dspark.kernels.tooling.aot import MAX_SHARED_BYTES

HOPPER = GPUTarget("cuda", 90, 32)


@triton.jit
def _matmul(a, b, out, K, M: tl.constexpr, BK: tl.constexpr):
    m, k = tl.arange(0, M), tl.arange(0, BK)
    total = tl.zeros([M, M], tl.float32)
    for start in range(0, K, BK):
        x = tl.load(a + m[:, None] * K + start + k[None, :])
        y = tl.load(b + (start + k[:, None]) * M + m[None, :])
        total = tl.dot(x, y, total)
    tl.store(out + m[:, None] * M + m[None, :], total)


def compile_matmul(block_k: int, stages: int):
    signature = {"a": "*bf16", "b": "*bf16", "out": "*fp32", "K": "i32"}
    constexprs = {"M": 64, "BK": block_k}
    source = ASTSource(
        _matmul,
        {**signature, **dict.fromkeys(constexprs, "constexpr")},
        constexprs,
        {(i,): [["tt.divisibility", 16]] for i in range(4)},
    )
    return triton.compile(source, target=HOPPER, options={"num_warps": 4, "num_stages": stages})


@pytest.fixture
def ada_on_hopper(tmp_path):
    with knobs.runtime.scope(), knobs.cache.scope():
        sm89_on_sm90.install(tmp_path)
        yield


@pytest.mark.usefixtures("ada_on_hopper")
def test_the_instructions_are_adas():
    ptx = compile_matmul(64, 2).asm["ptx"]
    assert ".target sm_89" in ptx
    assert "mma.sync" in ptx
    assert "wgmma" not in ptx


@pytest.mark.usefixtures("ada_on_hopper")
def test_shared_memory_beyond_ada_is_refused_although_hopper_has_it():
    with pytest.raises(RuntimeError, match=str(MAX_SHARED_BYTES)):
        compile_matmul(128, 6)


def test_without_it_hopper_gets_its_own_code_but_no_other_mma(tmp_path, monkeypatch):
    for name, value in COMPILER_SETTINGS.items():
        monkeypatch.setenv(name, value)
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        ptx = compile_matmul(64, 2).asm["ptx"]
    assert ".target sm_90a" in ptx
    assert "mma.sync" in ptx
    assert "wgmma" not in ptx


def test_a_process_without_our_settings_would_use_wgmma(monkeypatch, tmp_path):
    """What the settings are for: if this fails, Triton no longer needs them."""
    for name in COMPILER_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        assert "wgmma" in compile_matmul(64, 2).asm["ptx"]
