"""`dspark doctor`: look at this machine, and at a checkpoint, before serving.

Each line is ok, a note, or a problem with what to do. Exit status 1 when there is a problem.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from dspark.commands import checks
from dspark.commands.checks import Check, Gpu, State
from dspark.host import seams
from dspark.host.memory_budget import MIB
from dspark.standins import CPU_ENGINE, install_if_cpu

FIELDS = (
    "name",
    "compute_cap",
    "memory.free",
    "memory.total",
    "driver_version",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "pcie.link.gen.max",
)
UNDERLINED = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi does so even into a pipe
COMPILED = "attention"  # the family whose first kernel is compiled


def output(*command: str) -> str:
    """What a command prints; empty where it fails or does not exist."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def read_gpus(text: str) -> list[Gpu]:
    """From nvidia-smi's CSV of `FIELDS`, a line a card; an odd line is left out."""
    cards = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != len(FIELDS) or not words[2].isdecimal() or not words[3].isdecimal():
            continue
        major, _, minor = words[1].partition(".")
        width, most, generation = (int(w) if w.isdecimal() else None for w in words[5:])
        capability = (int(major), int(minor))
        free, total = (int(word) * MIB for word in words[2:4])
        cards.append(Gpu(words[0], capability, free, total, words[4], width, most, generation))
    return cards


def read_links(text: str) -> dict[tuple[int, int], bool]:
    """From the matrix of `nvidia-smi topo -p2p r`: whether card a may read card b."""
    links = {}
    for line in UNDERLINED.sub("", text).splitlines():
        match line.split():
            case [card, *words] if card.startswith("GPU") and not words[0].startswith("GPU"):
                for other, word in enumerate(words):
                    if word != "X":
                        links[int(card.removeprefix("GPU")), other] = word == "OK"
    return links


def available_memory(meminfo: str) -> int:
    """Bytes, from the text of /proc/meminfo; 0 where it does not say."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_seam_faults() -> list[str]:
    """Import what this package meets of SGLang, as a server here would."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault(CPU_ENGINE, "1")
        install_if_cpu()
    return seams.verify()


def compile_one(capability: int) -> list[str]:
    """Compile one kernel without running it; what is wrong with it."""
    from dspark.kernels.tooling import aot

    entry = next(entry for entry in aot.aot_entries(COMPILED) if entry.expects_mma)
    return aot.build(entry, capability).problems


def compiler(cards: list[Gpu]) -> Check:
    """For the first card, or for Ada where there is none."""
    try:
        from dspark.kernels.tooling import aot
    except ImportError as error:
        return Check("compiler", State.PROBLEM, str(error), "pip install triton")
    found = 10 * cards[0].capability[0] + cards[0].capability[1] if cards else aot.ADA
    capability = found if found in aot.CAPABILITIES else aot.ADA
    return checks.compiles(lambda: compile_one(capability), aot.architecture(capability))


def machine() -> Iterator[Check]:
    """Every check of this machine."""
    query = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
    cards = read_gpus(output(*query))
    yield checks.python_version(sys.version_info[:3])
    for requirement in importlib.metadata.requires("sglang-dspark") or ():
        if ";" not in requirement:  # not of an extra
            yield checks.package(requirement, installed(Requirement(requirement).name))
    yield checks.sglang(installed("sglang"))
    if seams.find_version_fault() is None:  # of another version every line would be a fault
        yield checks.seams(find_seam_faults(), len(seams.SEAMS))
    yield from checks.gpus(cards)
    yield from checks.pcie(cards)
    if len(cards) > 1:
        yield from checks.peer_access(read_links(output("nvidia-smi", "topo", "-p2p", "r")))
    groups = Path("/sys/kernel/iommu_groups")
    yield checks.iommu(len(list(groups.iterdir())) if groups.is_dir() else 0, len(cards))
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        yield checks.host_memory(available_memory(meminfo.read_text()), max(1, len(cards)))
    shared = Path("/dev/shm")
    size = shutil.disk_usage(shared).total if shared.is_dir() else None
    yield checks.shared_memory(size, len(cards))
    yield compiler(cards)


def model(directory: Path) -> list[Check]:
    if not directory.is_dir():
        return [Check("model", State.PROBLEM, f"{directory} is no folder", "download it first")]
    return checks.checkpoint(directory, shutil.disk_usage(directory).free)


def line(check: Check) -> str:
    advice = f"\n{'':22}-> {check.advice}" if check.advice else ""
    return f"{check.state.value:<8} {check.name:<12} {check.found}{advice}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="dspark doctor", description="Check this machine and a checkpoint before serving."
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint to check as well")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    found = [*machine(), *(model(options.model) if options.model else [])]
    problems = sum(check.state is State.PROBLEM for check in found)
    if options.json:
        lines = [check._asdict() | {"state": check.state.value} for check in found]
        print(json.dumps({"problems": problems, "checks": lines}, indent=1))
    else:
        print("\n".join(map(line, found)))
        print(f"{problems} problem{'' if problems == 1 else 's'}")
    return 1 if problems else 0
