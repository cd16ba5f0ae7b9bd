"""Which configurations fit an Ada card: compiled for sm_89 here, whatever the machine has."""

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from dspark.bench.tune.op import TunedOp, config_id
from dspark.kernels.common.launch_table import LaunchConfig
from dspark.kernels.tooling import aot
from dspark.kernels.tooling.entries import AotEntry, aot_entries


class Fit(NamedTuple):
    """Largest demand over all specialisations of the kernel."""

    shared: int  # bytes a block
    regs: int  # a thread
    spill: int  # bytes a thread
    problem: str | None  # one sentence; None = fits


def with_config(entry: AotEntry, config: LaunchConfig) -> AotEntry:
    """The same specialisation, launched as `config` says."""
    return entry._replace(
        name=f"{entry.name} {config_id(config)}",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constexprs={**entry.constexprs, **config.constexprs},
    )


def entries_of(op: TunedOp) -> list[AotEntry]:
    """ValueError if nothing is compiled for this op, because then nothing would be checked."""
    chosen = [entry for entry in aot_entries(op.family) if re.search(op.aot, entry.name)]
    if not chosen:
        raise ValueError(f"no AOT entry of {op.family} matches {op.aot!r}")
    return chosen


def fits(op: TunedOp, configs: Sequence[LaunchConfig], jobs: int | None = None) -> dict[str, Fit]:
    """Configuration id -> what it takes. Call it before CUDA starts: the workers are forked."""
    entries = entries_of(op)
    tasks = {config_id(c): [with_config(entry, c) for entry in entries] for c in configs}
    everything = [entry for group in tasks.values() for entry in group]
    builds = aot.build_all(everything, jobs or os.cpu_count() or 1)
    return {name: _fit([builds[entry.name] for entry in group]) for name, group in tasks.items()}


def _fit(builds: Sequence[aot.Build]) -> Fit:
    problems = [problem for build in builds for problem in build.problems]
    resources = [build.resources for build in builds]
    return Fit(
        max(r.shared for r in resources),
        max(r.registers for r in resources),
        max(r.spill for r in resources),
        problems[0] if problems else None,
    )
