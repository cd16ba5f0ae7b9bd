"""Write a checkpoint shard by shard: no more than one tensor is in memory at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from dspark.target.checkpoint.names import DRAFT_PREFIX, TORCH_DTYPE, Table, TensorSpec, total_bytes

SHARD_BYTES = 4 << 30
Produce = Callable[[str, TensorSpec], torch.Tensor]


class Written(NamedTuple):
    tensors: int
    nbytes: int
    shards: list[str]


def write_checkpoint(
    directory: Path, table: Table, produce: Produce, shard_bytes: int = SHARD_BYTES
) -> Written:
    """Write shards and `model.safetensors.index.json` into an existing directory.

    Args:
        table: tensors to write; shards follow its order.
        produce: called once per tensor, shard by shard.
        shard_bytes: a shard is closed before it would grow beyond this.

    Raises:
        ValueError: `produce` returned another dtype or shape than announced.
    """
    plan = plan_shards(table, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(plan, start=1):
        shard = f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        write_shard(directory / shard, {name: table[name] for name in names}, produce)
        weight_map |= dict.fromkeys(names, shard)
    nbytes = total_bytes(table)
    index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return Written(len(table), nbytes, sorted(set(weight_map.values())))


def plan_shards(table: Table, shard_bytes: int) -> list[list[str]]:
    """Names per shard. Draft tensors never share a shard with target tensors."""
    plan: list[list[str]] = []
    room = 0
    for name, spec in table.items():
        turns_to_draft = bool(plan) and _is_draft(name) != _is_draft(plan[-1][-1])
        if not plan or spec.nbytes > room or turns_to_draft:
            plan.append([])
            room = shard_bytes
        plan[-1].append(name)
        room -= spec.nbytes
    return plan


def write_shard(file: Path, table: Table, produce: Produce) -> None:
    """One safetensors file: header length, JSON header padded to 8 bytes, tensors back to back.

    Wide items come first, so that every tensor starts at a multiple of its item size.
    """
    order = sorted(table, key=lambda name: -TORCH_DTYPE[table[name].dtype].itemsize)
    header, offset = {}, 0
    for name in order:
        spec = table[name]
        end = offset + spec.nbytes
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little"))
        out.write(encoded)
        for name in order:
            out.write(_raw_bytes(name, table[name], produce(name, table[name])))


def _raw_bytes(name: str, spec: TensorSpec, tensor: torch.Tensor) -> memoryview:
    if tensor.dtype != TORCH_DTYPE[spec.dtype] or tuple(tensor.shape) != spec.shape:
        raise ValueError(
            f"Tensor {name} was announced as {spec.dtype} {list(spec.shape)} "
            f"but produced as {tensor.dtype} {list(tensor.shape)}."
        )
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _is_draft(name: str) -> bool:
    return name.startswith(DRAFT_PREFIX)
