"""Masters and training state on disk."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]
SHARD_BYTES = 15 << 20


def save_masters(directory: Path, stem: str, weights: Weights) -> list[Path]:
    """Write `<stem>-<i>.safetensors` files of at most 15 MiB (plus one tensor's rounding)."""
    shards: list[Weights] = [{}]
    room = SHARD_BYTES
    for name, tensor in weights.items():
        size = tensor.numel() * tensor.element_size()
        if size > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor.detach().cpu().contiguous()
        room -= size
    directory.mkdir(parents=True, exist_ok=True)
    files = [directory / f"{stem}-{i}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, file)
    return files


def load_masters(directory: Path, stem: str, device: torch.device) -> Weights:
    """Read what `save_masters` wrote.

    Raises:
        FileNotFoundError: no such file.
    """
    files = sorted(directory.glob(f"{stem}-*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} holds no {stem}-*.safetensors.")
    return {n: t.to(device) for file in files for n, t in load_file(file).items()}


def save_blocks(file: Path, blocks: Mapping[str, NamedTuple]) -> None:
    """Every field of every entry as the tensor `<entry>/<field>`."""
    save_file(
        {f"{name}/{field}": t for name, b in blocks.items() for field, t in b._asdict().items()},
        file,
    )


def save_state(file: Path, state: dict[str, Any]) -> None:
    """Replace the file as a whole, so that an interrupted run leaves the previous state."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, file)


def load_state(file: Path, device: torch.device) -> dict[str, Any] | None:
    if not file.exists():
        return None
    return torch.load(file, map_location=device, weights_only=True)


class Log:
    """One JSON object a line, printed as well."""

    def __init__(self, file: Path):
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file

    def __call__(self, **fields: Any) -> None:
        rounded = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in fields.items()}
        with self._file.open("a") as out:
            out.write(json.dumps(rounded) + "\n")
        print(" ".join(f"{k}={v}" for k, v in rounded.items()), flush=True)
