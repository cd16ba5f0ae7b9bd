"""Compile every entry of `entries.py` for sm_89 on a machine without a GPU, and check the result.

    python -m dspark.kernels.tooling.aot --check          # all entries; --fast: one per kernel
    python -m dspark.kernels.tooling.aot --update         # rewrite the golden resource table
    python -m dspark.kernels.tooling.aot --check --capability 120    # for another architecture

An entry fails when it needs more shared memory than an Ada block can have, spills registers
although it is hot, uses an instruction Ada lacks, lost the tensor-core instruction it should
have, or uses other resources than the golden table says. The table is of sm_89; an entry that is
compiled for another architecture may spill, and must otherwise keep within what Ada allows.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from dspark.kernels.common.dispatch import settle_compiler
from dspark.kernels.tooling.entries import ADA, AotEntry, aot_entries, target

settle_compiler()
CAPABILITIES = (ADA, 90, 120)
MAX_SHARED_BYTES = 101_376  # per block on sm_89
GOLDEN = Path(__file__).with_name("aot_resources.json")
# Hopper and Blackwell instructions that ptxas would reject or an Ada card could not run.
FORBIDDEN = ("wgmma", "cp.async.bulk", "cluster", "tensormap", "tcgen05", "griddepcontrol")


class Resources(NamedTuple):
    """What one compiled entry takes."""

    shared: int  # bytes of shared memory per block
    registers: int  # per thread
    spill: int  # bytes of spill stores per thread


class Build(NamedTuple):
    resources: Resources
    problems: list[str]  # one sentence each, empty when all checks pass


def build(entry: AotEntry, capability: int = ADA) -> Build:
    """Compile one entry for this capability and apply every check but the golden table."""
    arguments = entry.fn.arg_names
    signature = {
        name: "constexpr" if name in entry.constexprs else entry.signature[name]
        for name in arguments
    }
    attributes = {
        (arguments.index(name),): [["tt.divisibility", 16]]
        for name in entry.divisible
        if name not in entry.constexprs
    }
    source = ASTSource(entry.fn, signature, dict(entry.constexprs), attributes)
    options = {"num_warps": entry.num_warps, "num_stages": entry.num_stages}
    compiled = triton.compile(source, target=target(capability), options=options)
    ptx = compiled.asm["ptx"]
    registers, spill = registers_and_spill(ptx, capability)
    resources = Resources(compiled.metadata.shared, registers, spill)
    problems = problems_of(entry, ptx, resources, capability)
    if compiled.metadata.enable_fp_fusion:
        problems.append("may contract products, so that a row's bits change with its place")
    return Build(resources, problems)


def problems_of(
    entry: AotEntry, ptx: str, resources: Resources, capability: int = ADA
) -> list[str]:
    problems = []
    if resources.shared > MAX_SHARED_BYTES:
        problems.append(
            f"needs {resources.shared} B of shared memory, sm_89 has {MAX_SHARED_BYTES}"
        )
    if capability == ADA and entry.hot and resources.spill:  # elsewhere it costs time, no bit
        problems.append(f"is hot and spills {resources.spill} B")
    if not re.search(rf"^\.target {architecture(capability)}\b", ptx, re.MULTILINE):
        problems.append(f"is not code for {architecture(capability)}")
    problems += [f"uses {word}, which Ada lacks" for word in FORBIDDEN if word in ptx]
    if "e4m3x2.f16x2" in ptx:
        problems.append(
            "rounds f32 to e4m3 by way of fp16; use dspark.kernels.common.fp8_kernel.to_e4m3"
        )
    if entry.expects_mma and "mma.sync" not in ptx:
        problems.append("should use the tensor cores and does not")
    return problems


def architecture(capability: int) -> str:
    """As PTX and ptxas name it; from Hopper on Triton takes the instructions of one chip alone."""
    return f"sm_{capability}{'a' if capability >= 90 else ''}"


def registers_and_spill(ptx: str, capability: int) -> tuple[int, int]:
    """Registers a thread and bytes of spill stores, as ptxas reports them."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [
            get_ptxas(capability).path,
            "-v",
            f"--gpu-name={architecture(capability)}",
            str(source),
            "-o",
            str(Path(folder, "kernel.cubin")),
        ]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spill = re.search(r"(\d+) bytes spill stores", report)
    if registers is None or spill is None:
        raise RuntimeError(f"ptxas printed no resource line: {report}")
    return int(registers.group(1)), int(spill.group(1))


def first_of_each_kernel(entries: Iterable[AotEntry]) -> list[AotEntry]:
    """The fast subset: every kernel once."""
    chosen: dict[object, AotEntry] = {}
    for entry in entries:
        chosen.setdefault(entry.fn, entry)
    return list(chosen.values())


def build_all(entries: Sequence[AotEntry], jobs: int, capability: int = ADA) -> dict[str, Build]:
    """Builds by name. Worker processes are forked, so they inherit the imported kernels."""
    if jobs == 1:
        return {entry.name: _build_or_explain(entry, capability) for entry in entries}
    global _pending
    _pending = entries
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        builds = pool.map(_build_pending, range(len(entries)), repeat(capability))
        return {entry.name: result for entry, result in zip(entries, builds, strict=True)}


_pending: Sequence[AotEntry] = ()  # kernels cannot be pickled: forked workers look them up here


def _build_pending(index: int, capability: int) -> Build:
    return _build_or_explain(_pending[index], capability)


def _build_or_explain(entry: AotEntry, capability: int) -> Build:
    try:
        return build(entry, capability)
    except Exception as error:
        reason = str(error).strip().splitlines() or [repr(error)]
        return Build(Resources(0, 0, 0), [f"does not compile: {reason[-1]}"])


def drift(built: dict[str, Build], golden: dict, every_entry: bool) -> list[str]:
    """Differences from the golden table; none are reported across Triton versions."""
    if golden["triton"] != triton.__version__:
        return []
    lines = []
    known = golden["entries"]
    for name, result in built.items():
        if name not in known:
            lines.append(f"{name}: not in the golden table")
        elif Resources(**known[name]) != result.resources:
            lines.append(f"{name}: golden {known[name]}, now {result.resources._asdict()}")
    if every_entry:
        lines += [
            f"{name}: in the golden table but no longer built" for name in known.keys() - built
        ]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dspark.kernels.tooling.aot", description=__doc__
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="fail on any problem or drift")
    action.add_argument("--update", action="store_true", help="rewrite the golden table")
    parser.add_argument("--fast", action="store_true", help="with --check: one entry per kernel")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--capability", type=int, choices=CAPABILITIES, default=ADA)
    parser.add_argument("--family", help="only this family, e.g. attention")
    options = parser.parse_args(argv)
    if options.update and options.fast:
        parser.error("--update needs every entry, so it cannot be combined with --fast")
    if options.update and options.capability != ADA:
        parser.error(f"--update: the golden table is of {architecture(ADA)}")

    entries = aot_entries(options.family)
    if options.fast:
        entries = first_of_each_kernel(entries)
    built = build_all(entries, options.jobs, options.capability)
    for name, result in built.items():
        shared, registers, spill = result.resources
        print(f"{name:48} {shared:7} B shared {registers:4} registers {spill:5} B spilled")

    failures = [f"{name} {problem}" for name, b in built.items() for problem in b.problems]
    if options.update:
        table = {name: b.resources._asdict() for name, b in sorted(built.items())}
        if options.family:
            kept = _golden()["entries"].items()
            table |= {n: v for n, v in kept if not n.startswith(f"{options.family}.")}
        content = {"triton": triton.__version__, "entries": dict(sorted(table.items()))}
        GOLDEN.write_text(json.dumps(content, indent=1) + "\n")
    elif options.capability == ADA:
        failures += drift(built, _golden(), every_entry=not (options.fast or options.family))
    for line in failures:
        print(f"FAIL {line}", file=sys.stderr)
    print(f"{len(built)} entries, {len(failures)} failures")
    return 1 if failures else 0


def _golden() -> dict:
    if not GOLDEN.exists():
        return {"triton": triton.__version__, "entries": {}}
    return json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    sys.exit(main())
