"""Gather checkpoint tensors block by block, so that a loader never holds the whole model twice."""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from dspark.kernels.linear import Fp8Weight, prepare_fp8
from dspark.target.checkpoint.ledger import Ledger
from dspark.target.checkpoint.names import Table
from dspark.target.sharding import Rank, shard

logger = logging.getLogger(__name__)
NamedTensors = Iterable[tuple[str, torch.Tensor]]
_EXPERT_KEY = re.compile(r"ffn\.experts\.(\d+)\.(w[123])\.(weight|scale)")


class Parts:
    """One block's tensors as they arrive; routed experts are copied into stacks of `experts`.

    Keys are names without the block's prefix. The stacks are `experts.w13.weight` [E, 2I, Hd/2]
    (w1 above w3), `experts.w2.weight` [E, Hd, I/2] and their `.scale`, all uint8.
    """

    def __init__(self, rank: Rank, experts: int):
        self._rank = rank
        self._experts = experts
        self._tensors: dict[str, torch.Tensor] = {}

    def put(self, key: str, tensor: torch.Tensor) -> None:
        """Copy to the device; `tensor` may be a view of a mapped file."""
        if tensor.dtype in (torch.float8_e8m0fnu, torch.int8):
            tensor = tensor.view(torch.uint8)
        match = _EXPERT_KEY.fullmatch(key)
        if match is None:
            self._tensors[key] = tensor.to(self._rank.device, copy=True).contiguous()
            return
        expert, matrix, leaf = int(match[1]), match[2], match[3]
        rows, columns = tensor.shape
        first = rows if matrix == "w3" else 0
        shape = (rows if matrix == "w2" else 2 * rows, columns)
        stack = self._stack(f"experts.{'w2' if matrix == 'w2' else 'w13'}.{leaf}", shape)
        stack[expert, first : first + rows].copy_(tensor)

    def take(self, key: str) -> torch.Tensor:
        return self._tensors.pop(key)

    def fp8(self, module: str) -> Fp8Weight:
        return prepare_fp8(self.take(f"{module}.weight"), self.take(f"{module}.scale"))

    def assert_empty(self) -> None:
        """Every tensor that was loaded must also have found its place in the model."""
        assert not self._tensors, f"loaded but never used: {sorted(self._tensors)}"

    def _stack(self, key: str, shape: tuple[int, int]) -> torch.Tensor:
        if key not in self._tensors:
            self._tensors[key] = torch.empty(
                (self._experts, *shape), dtype=torch.uint8, device=self._rank.device
            )
        return self._tensors[key]


def collect_blocks(
    tensors: NamedTensors, table: Table, rank: Rank, experts: int
) -> Iterator[tuple[str, Parts]]:
    """Yield (prefix, parts) of each block as soon as its last tensor has arrived.

    Tensors that belong to no block come under the prefix "". Order of arrival does not matter.

    Raises:
        CheckpointError: `tensors` are not exactly those of `table` (see `Ledger`).
    """
    ledger = Ledger(table)
    waiting = Counter(split_name(name)[0] for name in table)
    blocks: dict[str, Parts] = {}
    for name, tensor in tensors:
        ledger.enter(name, tensor)
        prefix, key = split_name(name)
        if prefix not in blocks:
            blocks[prefix] = Parts(rank, experts)
        blocks[prefix].put(key, shard(name, tensor, table, rank))
        waiting[prefix] -= 1
        if not waiting[prefix]:
            yield prefix, blocks.pop(prefix)
    report = ledger.close()
    logger.info(
        "Loaded %d tensors, each exactly once, %.2f GiB in the checkpoint (rank %d of %d).",
        report.tensors,
        report.nbytes / 2**30,
        rank.number,
        rank.size,
    )


def split_name(name: str) -> tuple[str, str]:
    """`layers.3.attn.wkv.scale` -> (`layers.3.`, `attn.wkv.scale`); other names get prefix ""."""
    kind, _, rest = name.partition(".")
    if kind not in ("layers", "mtp"):
        return "", name
    number, _, key = rest.partition(".")
    return f"{kind}.{number}.", key
