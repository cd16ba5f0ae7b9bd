"""The shared file behind the sum through host memory.

It has a name only until every rank has opened it. After that nothing of it can be left behind,
however a server ends; its launcher reads the faults through the files that a rank holds open.
"""

import contextlib
import mmap
import os
import secrets
import struct
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.kernels.collective.host_layout import (
    FAULT_WORDS,
    HEAD_WORDS,
    MOST_RANKS,
    WORD,
    Layout,
)

SHARED = Path("/dev/shm")
PREFIX = "dspark-sum-"


def create(layout: Layout) -> str:
    """Make a file of zeros for one server; returns its name.

    Raises:
        OSError: there is no room for it.
    """
    name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    descriptor = os.open(SHARED / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, layout.nbytes)
        # Allocated, not only promised: a page that is missing later would be a signal, no error.
        os.posix_fallocate(descriptor, 0, layout.common_bytes)
    except OSError:
        remove(name)
        raise
    finally:
        os.close(descriptor)
    return name


def attach(name: str, layout: Layout, rank: int) -> Tensor:
    """u8 [layout.nbytes], the file.

    The pages of this rank are allocated here, near to its processor. The file stays open as long
    as the tensor lives, through a descriptor of the mapping's own.

    Raises:
        OSError: it is not on this machine, or there is no room.
    """
    descriptor = os.open(SHARED / name, os.O_RDWR)
    try:
        os.posix_fallocate(descriptor, layout.own_start(rank), layout.own_bytes)
        mapping = mmap.mmap(descriptor, layout.nbytes)
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def remove(name: str) -> None:
    (SHARED / name).unlink(missing_ok=True)


class Fault(NamedTuple):
    """Who was missing in a sum, and who waited in vain."""

    missing: int
    waited: list[int]


def fault_of(process: int) -> Fault | None:
    """What the ranks have noted in the file that `process` holds open; None if nothing.

    Of several ranks that were missing the one is named for which most others waited.
    """
    for file in Path(f"/proc/{process}/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed, or the process has ended
            if not os.readlink(file).startswith(f"{SHARED / PREFIX}"):
                continue
            with file.open("rb") as stream:
                if (fault := read_fault(stream.read(HEAD_WORDS * WORD))) is not None:
                    return fault
    return None


def read_fault(head: bytes) -> Fault | None:
    """head: the first HEAD_WORDS of the file. What a test at start has noted does not count."""
    words = struct.unpack(f"={HEAD_WORDS}i", head)
    if not words[FAULT_WORDS]:
        return None
    waited = [
        [waiter for waiter in range(MOST_RANKS) if words[waiter * MOST_RANKS + missing]]
        for missing in range(MOST_RANKS)
    ]
    missing = max(range(MOST_RANKS), key=lambda rank: len(waited[rank]))
    return Fault(missing, waited[missing]) if waited[missing] else None
