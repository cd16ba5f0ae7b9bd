"""What `dspark doctor` asks: each check takes what it inspects and returns one line.

Nothing here looks at the machine; `doctor.py` does, and a test can hand in what it likes.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from dspark.host import capabilities
from dspark.host.memory_budget import GIB
from dspark.host.seams import SGLANG_VERSION
from dspark.target.checkpoint.names import checkpoint_tensors, total_bytes
from dspark.target.checkpoint.preflight import check_headers
from dspark.target.checkpoint.reader import CheckpointError
from dspark.target.config import ConfigError, ModelConfig

PYTHONS = ((3, 11), (3, 12))
HOST_PER_RANK = 4 * GIB  # of a worker process: torch, CUDA's own, buffers of the loader
LEAST_SHARED = 1 * GIB  # of /dev/shm, which NCCL uses between cards


class State(enum.Enum):
    OK = "ok"
    NOTE = "note"  # serves all the same
    PROBLEM = "problem"


class Check(NamedTuple):
    """One line of the report."""

    name: str
    state: State
    found: str
    advice: str = ""  # what to do, where something is to be done


class Gpu(NamedTuple):
    """What the driver says of one card; None where it does not say."""

    name: str
    capability: tuple[int, int]
    free: int  # bytes
    total: int
    driver: str
    width: int | None  # PCIe lanes in use
    most_width: int | None
    generation: int | None  # PCIe, the highest that card and slot agree on


def python_version(found: tuple[int, ...]) -> Check:
    said = ".".join(map(str, found[:3]))
    if found[:2] in PYTHONS:
        return Check("python", State.OK, said)
    advice = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    return Check("python", State.PROBLEM, said, f"use Python {advice}")


def package(requirement: str, found: str | None) -> Check:
    """An installed distribution against a requirement such as "torch>=2.11"."""
    wanted = Requirement(requirement)
    if found is not None and wanted.specifier.contains(found.partition("+")[0], prereleases=True):
        return Check(wanted.name, State.OK, found)
    advice = f"pip install '{requirement}'"
    return Check(wanted.name, State.PROBLEM, found or "not installed", advice)


def sglang(found: str | None) -> Check:
    return package(f"sglang=={SGLANG_VERSION}", found)


def seams(faults: Sequence[str], count: int) -> Check:
    """`faults` are those of `dspark.host.seams.verify` over `count` seams."""
    if not faults:
        return Check("seams", State.OK, f"all {count} places where SGLang is met are as expected")
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    advice = f"reinstall it: pip install --force-reinstall sglang=={SGLANG_VERSION}"
    return Check("seams", State.PROBLEM, f"{faults[0]}{more}", advice)


def gpus(found: Sequence[Gpu]) -> list[Check]:
    """One line a card, and a word where they differ; one line where there is none."""
    if not found:
        return [
            Check(
                "gpu",
                State.NOTE,
                "none: the server runs on the CPU, which is enough for the demo, small "
                "checkpoints, tests and dspark plan",
                "to serve the full model use cards of compute capability "
                f"{capabilities.served()}, with their driver",
            )
        ]
    lines = [gpu(f"gpu {number}", card) for number, card in enumerate(found)]
    if len({(card.name, card.total) for card in found}) > 1:
        said = "the cards differ: every rank takes as much memory as the smallest has"
        lines.append(Check("gpus", State.NOTE, said))
    return lines


def gpu(name: str, card: Gpu) -> Check:
    major, minor = card.capability
    found = (
        f"{card.name}, compute capability {major}.{minor}, {card.free / GIB:.1f} of "
        f"{card.total / GIB:.1f} GiB free, driver {card.driver}"
    )
    known = capabilities.look_up(card.capability)
    if known.standing is capabilities.Standing.REFUSED:
        found += f"; a capability which {known.why}"
        return Check(name, State.PROBLEM, found, f"serve on a card of {capabilities.served()}")
    if known.standing is capabilities.Standing.COMPILED:
        found += f"; a capability which {known.why}"
        return Check(name, State.NOTE, found, "compare outputs: dspark bench exact")
    return Check(name, State.OK, found)


def pcie(cards: Sequence[Gpu]) -> list[Check]:
    """Lanes and generation; between several cards every sum of a step passes there."""
    lines = []
    for number, card in enumerate(cards):
        if card.width is None or card.most_width is None:
            continue
        found = f"{card.width} of {card.most_width} lanes, generation {card.generation or '?'}"
        if len(cards) > 1 and card.width < card.most_width:
            advice = "put it into a slot with all lanes, or use a riser that carries them"
            lines.append(Check(f"pcie {number}", State.NOTE, found, advice))
        else:
            lines.append(Check(f"pcie {number}", State.OK, found))
    return lines


def peer_access(links: Mapping[tuple[int, int], bool]) -> list[Check]:
    """links: whether one card can read another's memory, for every ordered pair."""
    if not links:
        return []
    if all(links.values()):
        return [Check("peers", State.OK, "every card can read the others' memory")]
    lacking = sum(not reads for reads in links.values())
    found = (
        f"{lacking} of {len(links)} pairs of cards cannot read each other's memory: sums over "
        "ranks pass through host memory, with the same bits"
    )
    return [Check("peers", State.NOTE, found)]


def iommu(groups: int, cards: int) -> Check:
    """groups: entries of /sys/kernel/iommu_groups."""
    if not groups:
        return Check("iommu", State.OK, "off")
    found = f"on, {groups} groups"
    if cards < 2:
        return Check("iommu", State.OK, found)
    advice = "if NCCL hangs or is slow, start the kernel with iommu=pt, or switch it off"
    return Check("iommu", State.NOTE, found, advice)


def host_memory(available: int, ranks: int) -> Check:
    found = f"{available / GIB:.1f} GiB available"
    needed = ranks * HOST_PER_RANK
    if available >= needed:
        return Check("memory", State.OK, found)
    state = State.PROBLEM if ranks > 1 else State.NOTE
    advice = f"{ranks} worker process{'es' if ranks > 1 else ''} may take {needed / GIB:.0f} GiB"
    return Check("memory", state, found, f"{advice}: end others or add memory")


def shared_memory(size: int | None, cards: int) -> Check:
    """size: of /dev/shm, None where there is none."""
    found = "no /dev/shm" if size is None else f"/dev/shm has {size / GIB:.2f} GiB"
    if cards < 2 or (size or 0) >= LEAST_SHARED:
        return Check("shm", State.OK, found)
    return Check("shm", State.PROBLEM, found, "give a container --shm-size=8g or --ipc=host")


def compiles(build: Callable[[], list[str]], architecture: str) -> Check:
    """build: compiles one kernel and returns what is wrong with it."""
    try:
        problems = build()
    except Exception as error:  # a missing compiler fails in any way
        problems = [str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)]
    if not problems:
        return Check("compiler", State.OK, f"a kernel compiles for {architecture}")
    return Check("compiler", State.PROBLEM, problems[0], "reinstall triton: pip install triton")


def checkpoint(directory: Path, free_disk: int) -> list[Check]:
    """Configuration, draft and the header of every shard; no tensor is read.

    free_disk: bytes free where the checkpoint is, or is to be.
    """
    try:
        config = ModelConfig.from_checkpoint(directory)
    except ConfigError as error:
        return [Check("model", State.PROBLEM, str(error), "name the folder of a checkpoint")]
    size = total_bytes(checkpoint_tensors(config))
    lines = [
        Check(
            "model",
            State.OK,
            f"DeepSeek-V4, {config.num_hidden_layers} layers, {size / GIB:.2f} GiB of tensors",
        ),
        draft(config),
    ]
    try:
        tensors = check_headers(directory, config, target=True, draft=config.dspark is not None)
        lines.append(Check("tensors", State.OK, f"all {tensors:,}, each as it should be"))
    except (CheckpointError, ConfigError) as error:
        advice = "download the checkpoint again; what is whole is kept"
        lines.append(Check("tensors", State.PROBLEM, str(error), advice))
        lines.append(disk(size, free_disk))
    return lines


def draft(config: ModelConfig) -> Check:
    if config.dspark is None:
        advice = "take a checkpoint with DSpark stages; without them it serves target-only"
        return Check("draft", State.NOTE, "the checkpoint has no DSpark draft", advice)
    stages, block = config.dspark.stages, config.dspark.block_size
    return Check("draft", State.OK, f"{stages} DSpark stages, {block} tokens a step")


def disk(needed: int, free: int) -> Check:
    """Room for the whole checkpoint, where tensors are missing."""
    found = f"{free / GIB:.1f} GiB free"
    if free >= needed:
        return Check("disk", State.OK, found)
    return Check("disk", State.PROBLEM, found, f"the checkpoint takes {needed / GIB:.1f} GiB")
