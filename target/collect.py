"""Gather checkpoint tensors block by block, so that a loader never holds the whole model twice."""

import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from dspark.kernels.linear import Fp8Weight, prepare_fp8
from dspark.target.checkpoint.ledger import Ledger
from dspark.target.checkpoint.names import TORCH_DTYPE, Table
from dspark.target.checkpoint.reader import Stored
from dspark.target.sharding import Rank, part_bytes, part_of
from dspark.target.staging import Staging

logger = logging.getLogger(__name__)
GIB = 1 << 30
_EXPERT_KEY = re.compile(r"ffn\.experts\.(\d+)\.(w[123])\.(weight|scale)")


class Parts:
    """One block's tensors as they arrive; routed experts are copied into stacks of `experts`.

    Keys are names without the block's prefix. The stacks are `experts.w13.weight` [E, 2I, Hd/2]
    (w1 above w3), `experts.w2.weight` [E, Hd, I/2] and their `.scale`, all uint8.
    """

    def __init__(self, staging: Staging, experts: int):
        self._staging = staging
        self._experts = experts
        self._tensors: dict[str, torch.Tensor] = {}

    def load(self, key: str, stored: Stored, part: tuple[slice, ...]) -> None:
        """Copy a part of a tensor to the device.

        Raises: as `Staging.load`.
        """
        shape = tuple(s.stop - s.start for s in part)
        dtype = TORCH_DTYPE[stored.spec.dtype]
        if dtype in (torch.float8_e8m0fnu, torch.int8):
            dtype = torch.uint8
        match = _EXPERT_KEY.fullmatch(key)
        if match is None:
            into = torch.empty(shape, dtype=dtype, device=self._staging.device)
            self._tensors[key] = into
        else:
            into = self._place_of_expert(int(match[1]), match[2], match[3], shape)
        self._staging.load(into, stored, part)

    def take(self, key: str) -> torch.Tensor:
        return self._tensors.pop(key)

    def fp8(self, module: str) -> Fp8Weight:
        return prepare_fp8(self.take(f"{module}.weight"), self.take(f"{module}.scale"))

    def assert_empty(self) -> None:
        """Every tensor that was loaded must also have found its place in the model."""
        assert not self._tensors, f"loaded but never used: {sorted(self._tensors)}"

    def _place_of_expert(
        self, expert: int, matrix: str, leaf: str, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Where in its stack a matrix of [rows, columns] belongs."""
        rows, columns = shape
        down = matrix == "w2"
        key = f"experts.{'w2' if down else 'w13'}.{leaf}"
        if key not in self._tensors:
            self._tensors[key] = torch.empty(
                (self._experts, rows if down else 2 * rows, columns),
                dtype=torch.uint8,
                device=self._staging.device,
            )
        first = rows if matrix == "w3" else 0
        return self._tensors[key][expert, first : first + rows]


def collect_blocks(
    tensors: Iterable[Stored], table: Table, rank: Rank, experts: int, what: str
) -> Iterator[tuple[str, Parts]]:
    """Load this rank's parts, and yield (prefix, parts) of each block once its last has arrived.

    Tensors that belong to no block come under the prefix "". Order of arrival does not matter.
    Rank 0 shows its progress; every rank says in the end what loading took.

    Args:
        what: name of the whole, in the progress bar and that line.

    Raises:
        CheckpointError: `tensors` are not exactly those of `table` (see `Ledger`).
    """
    started = time.perf_counter()
    ledger = Ledger(table)
    waiting = Counter(split_name(name)[0] for name in table)
    blocks: dict[str, Parts] = {}
    staging = Staging(rank.device)
    total = sum(part_bytes(name, table, rank) for name in table)
    with tqdm(
        desc=f"Loading the {what}",
        total=total,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=rank.number > 0,
    ) as bar:
        for stored in tensors:
            ledger.enter(stored)
            prefix, key = split_name(stored.name)
            if prefix not in blocks:
                blocks[prefix] = Parts(staging, experts)
            blocks[prefix].load(key, stored, part_of(stored.name, table, rank))
            bar.update(staging.nbytes - bar.n)
            waiting[prefix] -= 1
            if not waiting[prefix]:
                yield prefix, blocks.pop(prefix)
    report = ledger.close()
    logger.info(
        "Loaded the %s: %d tensors, each exactly once; rank %d of %d read %.2f of %.2f GiB in "
        "%.1f s. Most host memory of this process so far: %.2f GiB.",
        what,
        report.tensors,
        rank.number,
        rank.size,
        staging.nbytes / GIB,
        report.nbytes / GIB,
        time.perf_counter() - started,
        peak_host_bytes() / GIB,
    )


def peak_host_bytes() -> int:
    """Most host memory that this process has held, mapped files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("the kernel does not say how much memory a process has held")


def split_name(name: str) -> tuple[str, str]:
    """`layers.3.attn.wkv.scale` -> (`layers.3.`, `attn.wkv.scale`); other names get prefix ""."""
    kind, _, rest = name.partition(".")
    if kind not in ("layers", "mtp"):
        return "", name
    number, _, key = rest.partition(".")
    return f"{kind}.{number}.", key
