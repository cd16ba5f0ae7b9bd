"""One public op and what it is called with, and what every record of ops begins with."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dspark.bench import environment
from dspark.bench.graph_time import copies_for, copy_bandwidth
from dspark.kernels.tooling import sm89_on_sm90


class OpCase(NamedTuple):
    """Every copy holds other inputs, so that a launch does not find its own in the cache."""

    name: str
    function: Callable[..., Any]
    inputs: Sequence[dict[str, Any]]  # keyword arguments, one dict a copy
    moved: int = 0  # bytes a call must move; 0 = not given

    def launch(self, copy: int) -> Any:
        return self.function(**self.inputs[copy])


def copies_on(device: torch.device, moved: int, most: int = 64) -> int:
    """`copies_for` on a GPU; one on a CPU, where nothing is timed."""
    return copies_for(moved, most) if device.type == "cuda" else 1


def problem_of(error: Exception) -> str:
    """One line for a record; the traceback is printed. One failing op must not lose the others."""
    traceback.print_exc()
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def begin_record(kind: str, sm89: bool) -> dict[str, Any]:
    """The head of a record of ops on this card, whose copy bandwidth is measured and printed.

    sm89: generate Ada code from now on, in this process.
    """
    if sm89:
        sm89_on_sm90.install()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, {bandwidth / 1e12:.2f} TB/s copied")
    return {
        "schema": 1,
        "kind": kind,
        "environment": environment.describe(),
        "sm89": sm89,
        "copy_bandwidth": bandwidth,
        "figures": [],
    }
