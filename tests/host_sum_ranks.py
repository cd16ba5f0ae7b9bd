"""Triton kernels that run all ranks of a sum through host memory as programs of one launch.

Each rank goes through many sums on its own, so that fast ranks are a sum ahead of slow ones. A copy
of `host_kernel.py` with edits may stand in front of these kernels in place of the import
(`edited`): staggered, so that warps and ranks are late at random, or mutated.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import triton
import triton.language as tl

from dspark.kernels.collective import host_kernel as original
from dspark.kernels.collective.host_kernel import one_shot, two_shot

CHANNELS = tl.constexpr(original.host_layout.CHANNELS)


@triton.jit
def all_one_shot(
    partials, outs, slot, flag, fault, epochs, control, sums,
    RANKS: tl.constexpr, OWN: tl.constexpr, SLOT: tl.constexpr, ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """partials, outs: i32 [sums, RANKS, ROW]; epochs [RANKS, CHANNELS], control [RANKS, 2].

    Grid: (1, ranks that come).
    """
    rank = tl.program_id(1)
    for number in range(sums):
        at = (number * RANKS + rank) * ROW
        one_shot(
            partials + at, outs + at, slot, flag, fault, epochs + rank * CHANNELS,
            control + rank * 2, rank, RANKS, OWN, SLOT, ROW, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()  # the next sum reads the epoch that one thread has stored


@triton.jit
def all_two_shot(
    partials, outs, slot, part, flag, fault, epochs, control, sums, rows,
    RANKS: tl.constexpr, OWN: tl.constexpr, SLOT: tl.constexpr, PART: tl.constexpr,
    ROW: tl.constexpr, SLICE: tl.constexpr, BLOCK: tl.constexpr, SLICE_BLOCK: tl.constexpr,
):  # fmt: skip
    """As above, with `rows` rows. Grid: (groups of rows, ranks that come)."""
    rank = tl.program_id(1)
    for number in range(sums):
        at = (number * RANKS + rank) * rows * ROW
        two_shot(
            partials + at, outs + at, slot, part, flag, fault, epochs + rank * CHANNELS,
            control + rank * 2, rank, rows, RANKS, OWN, SLOT, PART, ROW, SLICE, BLOCK,
            SLICE_BLOCK,
        )  # fmt: skip
        tl.debug_barrier()


Edit = tuple[str, str]  # what stands in host_kernel.py, and what stands there instead

STAGGER: Sequence[Edit] = (
    (
        "@triton.jit\ndef release(",
        '''@triton.jit
def stagger():
    tl.inline_asm_elementwise(
        """{
            .reg .pred short;
            .reg .u32 a, b;
            mov.u32 a, %clock;
            mov.u32 b, %smid;
            mad.lo.u32 a, b, 0x9E3779B1, a;
            mov.u32 b, %warpid;
            mad.lo.u32 a, b, 0x85EBCA77, a;
            mul.lo.u32 a, a, 0xC2B2AE3D;
            bfe.u32 b, a, 8, 3;
            setp.ne.u32 short, b, 0;  // one warp in eight is much later than the others
            shr.u32 a, a, 18;
            @short shr.u32 a, a, 8;
            nanosleep.u32 a;
            mov.u32 $0, 0;
        }""",
        "=r,r,~{memory}",
        [0],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def release(''',
    ),
    ("    tl.store(rows + rank * OWN", "    stagger()\n    tl.store(rows + rank * OWN"),
    ("    tl.store(in_slot + rank * OWN", "    stagger()\n    tl.store(in_slot + rank * OWN"),
    ("    tl.store(in_part + rank * OWN", "    stagger()\n    tl.store(in_part + rank * OWN"),
    ("    loaded = ()\n", "    stagger()\n    loaded = ()\n"),
)  # fmt: skip

MUTATIONS: dict[str, Sequence[Edit]] = {
    "no barrier before the release": (
        (
            'has stored."""\n    tl.debug_barrier()\n',
            'has stored."""\n',
        ),
    ),
    "no release": (("@first st.release.sys.global.u32 [$1], $2;", ""),),
    "two slots made one": (("(epoch % SLOTS)", "tl.minimum(epoch % SLOTS, 1)"),),
    "slots by the low 32 bits": (("(epoch % SLOTS)", "((epoch & 0xFFFFFFFF) % SLOTS)"),),
    "two ranks swapped": (
        ("low += _low(loaded[rank])", "low += _low(loaded[2 * first + 4 - rank])"),
        ("high += _high(loaded[rank])", "high += _high(loaded[2 * first + 4 - rank])"),
    ),
    "epochs compared without the circle": (
        (
            "sub.s32 ahead, seen, $2;\n                setp.ge.s32 done, ahead, 0;",
            "setp.ge.u32 done, seen, $2;",
        ),
    ),
    "nobody waits": (("                @done bra AGAIN;\n", "                bra OVER;\n"),),
}


def source(edits: Sequence[Edit]) -> str:
    """`host_kernel.py` with edits, and the kernels above behind it."""
    text = Path(original.__file__).read_text()
    for old, new in edits:
        assert old in text, f"host_kernel.py has changed, no {old!r} in it"
        text = text.replace(old, new)
    own = Path(__file__).read_text()
    begin, end = own.index("CHANNELS = "), own.index("Edit = ")
    return text + "\n" + own[begin:end].replace("original.", "")


def edited(edits: Sequence[Edit], folder: Path, name: str) -> ModuleType:
    """A module of `source`; Triton reads kernels from files."""
    file = folder / f"{name}.py"
    file.write_text(source(edits))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
