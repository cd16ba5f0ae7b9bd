"""What the tuner needs to know about one kernel."""

import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dspark.kernels.common.launch_table import LaunchConfig

CASE_SETS = ("smoke", "representative", "exhaustive")
Launch = Callable[[int], torch.Tensor]  # copy of the inputs -> output


class Case(NamedTuple):
    """One shape. Every copy holds other inputs, so that a launch does not find its own in L2."""

    name: str
    build: Callable[[torch.device, int], Launch]  # (device, copies) -> launch
    moved: int  # bytes that one launch reads and that other copies do not share


class Check(NamedTuple):
    """A small case with an expected result, fit for the interpreter as well."""

    name: str
    run: Callable[[torch.device], torch.Tensor]  # the public op
    expected: Callable[[], torch.Tensor]  # the reference, on the CPU
    tolerance: float  # relative root mean square; 0 = equal


class TunedOp(NamedTuple):
    """One entry of a family's launch table and how to judge replacements of it."""

    family: str
    entry: str
    cases: Callable[[str], list[Case]]  # of a case set
    candidates: Sequence[LaunchConfig]  # only fields that cannot change a result
    checks: Sequence[Check]
    aot: str  # regular expression: AOT entries that are launched with this configuration

    @property
    def name(self) -> str:
        return f"{self.family}.{self.entry}"

    def table(self) -> dict[str, LaunchConfig]:
        return importlib.import_module(f"dspark.kernels.{self.family}.kernel").LAUNCH

    def incumbent(self) -> LaunchConfig:
        return self.table()[self.entry]


def config_id(config: LaunchConfig) -> str:
    """Short and unique: warps, stages, then the constants, as in "w4-s3-BN64"."""
    constants = [f"{name}{value}" for name, value in sorted(config.constexprs.items())]
    return "-".join([f"w{config.num_warps}", f"s{config.num_stages}", *constants])


def grid(
    warps: Sequence[int],
    stages: Sequence[int],
    fixed: Mapping[str, int] | None = None,
    **choices: Sequence[int],
) -> list[LaunchConfig]:
    """Every combination; `fixed` constants are the same in all of them."""
    return [
        LaunchConfig(w, s, {**(fixed or {}), **dict(zip(choices, values, strict=True))})
        for w, s, *values in itertools.product(warps, stages, *choices.values())
    ]


@contextlib.contextmanager
def configured(op: TunedOp, config: LaunchConfig) -> Iterator[None]:
    """Launch `op` with `config` inside the block."""
    table = op.table()
    before = table[op.entry]
    table[op.entry] = config
    try:
        yield
    finally:
        table[op.entry] = before


def ops_of(module: str) -> tuple[TunedOp, ...]:
    return importlib.import_module(module).OPS


def seeded(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def config_json(config: LaunchConfig) -> dict[str, Any]:
    return {**config._asdict(), "constexprs": dict(config.constexprs)}
