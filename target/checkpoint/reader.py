"""Read a safetensors checkpoint: shards are opened only when a tensor inside them is wanted."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message is one sentence naming tensor or file."""


class Checkpoint:
    """Names and shards of a checkpoint directory; tensors come out of `tensors`.

    Attributes:
        directory: where the shards are.
        shard_of: file name of the shard that holds each tensor.
        opened: file names of the shards opened so far, in order.
    """

    def __init__(self, directory: str | Path):
        """Read the index (or the header of a single file); no tensor data.

        Raises:
            CheckpointError: no index and no single file, or they are damaged.
        """
        self.directory = Path(directory)
        self.opened: list[str] = []
        self.shard_of = self._read_index()

    def tensors(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor whose name is `wanted`, shard by shard, as (name, CPU tensor).

        Tensors may be views of a mapped file: copy what is kept.

        Raises:
            CheckpointError: a shard is missing, truncated, damaged, or disagrees with the index.
        """
        shards: dict[str, list[str]] = {}
        for name, shard in self.shard_of.items():
            if wanted(name):
                shards.setdefault(shard, []).append(name)
        for shard, names in shards.items():
            yield from self._shard_tensors(shard, names)

    def _shard_tensors(self, shard: str, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        file = self.directory / shard
        self.opened.append(shard)
        present = read_header(file)
        for name in present:
            if self.shard_of.get(name) != shard:
                raise CheckpointError(
                    f"{file} holds tensor {name}, which {INDEX} does not list there."
                )
        for name in names:
            if name not in present:
                raise CheckpointError(
                    f"{INDEX} lists tensor {name} in {file}, which has no such tensor."
                )
        try:
            with safe_open(str(file), framework="pt") as handle:
                for name in names:
                    yield name, handle.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged: {error}.") from error

    def _read_index(self) -> dict[str, str]:
        index = self.directory / INDEX
        if not index.exists():
            if not (self.directory / SINGLE).exists():
                raise CheckpointError(f"{self.directory} holds neither {INDEX} nor {SINGLE}.")
            self.opened.append(SINGLE)
            return dict.fromkeys(read_header(self.directory / SINGLE), SINGLE)
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            return {str(name): str(shard) for name, shard in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} has no readable weight_map.") from error


def read_header(file: Path) -> dict[str, Any]:
    """Tensor entries of a safetensors file, after checking that its data is complete.

    Raises:
        CheckpointError: the file is absent, damaged or truncated.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if size < 8 + length:
                raise CheckpointError(f"{file} is truncated: its header does not fit the file.")
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            ends = [entry["data_offsets"][1] for entry in header.values()]
    except OSError as error:
        raise CheckpointError(f"Cannot read {file}: {error.strerror}.") from error
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} has no readable safetensors header.") from error
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise CheckpointError(f"{file} is truncated: it has {size} of {expected} bytes.")
    return header
