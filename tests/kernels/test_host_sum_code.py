"""What the compiler makes of the sum through host memory: its order in memory, for an Ada card."""

import ast
import re

import pytest
import triton
from host_sum_ranks import MUTATIONS, STAGGER, source
from triton.compiler import ASTSource

from dspark.kernels.collective import host_kernel
from dspark.kernels.common.dispatch import settle_compiler
from dspark.kernels.tooling.entries import aot_entries, target


@pytest.fixture(scope="module", params=[host_kernel.one_shot, host_kernel.two_shot])
def memory_code(request):
    """(waits, instructions): those of PTX that touch memory or are barriers, in order."""
    settle_compiler()
    (entry,) = (e for e in aot_entries("collective") if e.fn is request.param)
    names = entry.fn.arg_names
    signature = {name: entry.signature.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in entry.divisible}
    source = ASTSource(entry.fn, signature, dict(entry.constexprs), aligned)
    ptx = triton.compile(source, target=target(), options={"num_warps": entry.num_warps}).asm["ptx"]
    found = re.findall(r"\b((?:ld|st)\.(?!param)[\w.]+|bar\.sync|(?:atom|red)\.[\w.]+)", ptx)
    return (1 if request.param is host_kernel.one_shot else 2), found


def test_a_flag_is_released_behind_a_barrier_and_followed_by_a_wait(memory_code):
    waits, code = memory_code
    released = [i for i, name in enumerate(code) if name.startswith("st.release")]
    assert len(released) == waits
    for i in released:
        assert code[i - 2].startswith("st.global.v4")  # what is published
        assert code[i - 1 : i + 5] == [
            "bar.sync",
            "st.release.sys.global.u32",
            "ld.acquire.sys.global.u32",
            "st.relaxed.sys.global.u32",  # who is missing
            "st.relaxed.gpu.global.u64",
            "bar.sync",
        ]


def test_all_ranks_are_read_at_once_past_every_cache(memory_code):
    """Sixteen bytes a thread and load, and nothing of the result is used before the last load."""
    waits, code = memory_code
    text = " ".join("read" if name == "ld.volatile.global.v4.b32" else name for name in code)
    loads = 16 if waits == 1 else 8  # a row of 8 KB in 256 threads; an eighth of four rows
    runs = re.findall(r"bar\.sync ((?:read )+)bar\.sync ld\.volatile\.global\.b64", text)
    assert [len(run.split()) for run in runs] == [loads] * waits
    assert text.count("read") == loads * waits


def test_no_atomic_touches_memory(memory_code):
    assert not [name for name in memory_code[1] if name.startswith(("atom", "red"))]


@pytest.mark.parametrize("mutation", [None, *MUTATIONS])
def test_the_edits_of_gpu_tests_still_apply(mutation):
    edits = [*(() if mutation is None else MUTATIONS[mutation]), *STAGGER]
    functions = {node.name for node in ast.walk(ast.parse(source(edits))) if hasattr(node, "args")
                 and hasattr(node, "name")}  # fmt: skip
    assert {"stagger", "one_shot", "two_shot", "all_one_shot", "all_two_shot"} <= functions
