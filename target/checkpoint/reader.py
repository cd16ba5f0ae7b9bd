"""Read a safetensors checkpoint by parts: only bytes that are asked for come from the files.

A part is mapped for as long as it is copied. What a process needs is then one window of the file
(`WINDOW`) and, on CUDA, the pinned buffers of `target.staging`; the rest of a file is in the page
cache, which is one for all ranks and which the kernel takes back when memory is short. Eight ranks
that read a checkpoint of 155 GiB on a machine of 64 GiB hold 8 * 48 MiB between them on top of what
the processes are by themselves: the weights go to the cards as they come. Each rank goes through
the shards in the same order and needs about the same share of each, so that one that is ahead
waits for the disk, others find its pages in the cache, and a page is read from the disk about once.
A rank's columns of a matrix lie in nearly every page of it; such pages are shared in the same way.
"""

import json
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dspark.target.checkpoint.names import TORCH_DTYPE, TensorSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WINDOW = 16 << 20  # most bytes of a file that are mapped at a time; no row is longer


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message is one sentence naming tensor or file."""


class Stored(NamedTuple):
    """A tensor of a shard; nothing of it has been read."""

    name: str
    spec: TensorSpec
    file: Path
    start: int  # byte of the file where its data begins

    def windows(self, part: tuple[slice, ...]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Map a part of it, a few rows at a time.

        Args:
            part: rows and, for a matrix, columns that are wanted; both with start and stop.

        Yields:
            (which rows of the part, CPU tensor with them): a view of the file that must not be
            written to. Drop it before the next one is asked for.
        """
        rows, *columns = part
        row_bytes = self.spec.nbytes // self.spec.shape[0]
        step = WINDOW // row_bytes
        with self.file.open("rb") as stream:
            for first in range(rows.start, rows.stop, step):
                stop = min(first + step, rows.stop)
                begin = self.start + first * row_bytes
                raw = map_bytes(stream.fileno(), begin, (stop - first) * row_bytes)
                window = raw.view(TORCH_DTYPE[self.spec.dtype]).view(-1, *self.spec.shape[1:])
                yield slice(first - rows.start, stop - rows.start), window[:, *columns]

    def whole(self) -> torch.Tensor:
        """All of it, copied."""
        tensor = torch.empty(self.spec.shape, dtype=TORCH_DTYPE[self.spec.dtype])
        for rows, window in self.windows(tuple(slice(0, n) for n in self.spec.shape)):
            tensor[rows].copy_(window)
        return tensor


class Checkpoint:
    """Names and shards of a checkpoint directory; tensors come out of `stored`.

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

    def stored(self, wanted: Callable[[str], bool]) -> Iterator[Stored]:
        """Yield every tensor whose name is `wanted`, shard by shard, in the order of the data.

        Raises:
            CheckpointError: a shard is missing, truncated, damaged, or disagrees with the index.
        """
        shards: dict[str, list[str]] = {}
        for name, shard in self.shard_of.items():
            if wanted(name):
                shards.setdefault(shard, []).append(name)
        for shard, names in shards.items():
            yield from self._of_shard(shard, names)

    def tensors(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, CPU tensor) of every tensor whose name is `wanted`, read as a whole.

        Raises: as `stored`.
        """
        for stored in self.stored(wanted):
            yield stored.name, stored.whole()

    def _of_shard(self, shard: str, names: list[str]) -> list[Stored]:
        file = self.directory / shard
        self.opened.append(shard)
        header = read_header(file)
        for name in header.entries:
            if self.shard_of.get(name) != shard:
                raise CheckpointError(
                    f"{file} holds tensor {name}, which {INDEX} does not list there."
                )
        for name in names:
            if name not in header.entries:
                raise CheckpointError(
                    f"{INDEX} lists tensor {name} in {file}, which has no such tensor."
                )
        found = [
            Stored(
                name,
                spec_of(header.entries[name]),
                file,
                header.nbytes + header.entries[name]["data_offsets"][0],
            )
            for name in names
        ]
        return sorted(found, key=lambda stored: stored.start)

    def _read_index(self) -> dict[str, str]:
        index = self.directory / INDEX
        if not index.exists():
            if not (self.directory / SINGLE).exists():
                raise CheckpointError(f"{self.directory} holds neither {INDEX} nor {SINGLE}.")
            self.opened.append(SINGLE)
            return dict.fromkeys(read_header(self.directory / SINGLE).entries, SINGLE)
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            return {str(name): str(shard) for name, shard in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} has no readable weight_map.") from error


def map_bytes(descriptor: int, begin: int, nbytes: int) -> torch.Tensor:
    """u8 [nbytes] of a file, mapped for as long as the tensor lives.

    The kernel is asked to start reading all of it at once.
    """
    before = begin % mmap.ALLOCATIONGRANULARITY
    # A private mapping, since torch wants memory that could be written to.
    mapped = mmap.mmap(descriptor, before + nbytes, access=mmap.ACCESS_COPY, offset=begin - before)
    mapped.madvise(mmap.MADV_WILLNEED)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=before)


class Header(NamedTuple):
    entries: dict[str, Any]  # dtype, shape and data_offsets of each tensor
    nbytes: int  # before the data


def read_header(file: Path) -> Header:
    """Header of a safetensors file, after checking that its data is complete.

    Raises:
        CheckpointError: the file is absent, damaged or truncated.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if size < 8 + length:
                raise CheckpointError(f"{file} is truncated: its header does not fit the file.")
            entries = json.loads(stream.read(length))
            entries.pop("__metadata__", None)
            end = check_layout(file, entries)
    except OSError as error:
        raise CheckpointError(f"Cannot read {file}: {error.strerror}.") from error
    except (UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} has no readable safetensors header.") from error
    expected = 8 + length + end
    if size < expected:
        raise CheckpointError(f"{file} is truncated: it has {size} of {expected} bytes.")
    return Header(entries, 8 + length)


def check_layout(file: Path, entries: dict[str, Any]) -> int:
    """Bytes of a shard's data, after checking that its tensors fill them one after the other.

    Raises:
        CheckpointError: there is a gap, an overlap, or a tensor's place is not of its size.
    """
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        spec, (begin, after) = spec_of(entry), entry["data_offsets"]
        fits = spec.dtype not in TORCH_DTYPE or after - begin == spec.nbytes
        if begin != end or not fits:
            raise CheckpointError(f"{file} is damaged: tensor {name} does not fill its place.")
        end = after
    return end


def spec_of(entry: dict[str, Any]) -> TensorSpec:
    return TensorSpec(entry["dtype"], tuple(entry["shape"]))
