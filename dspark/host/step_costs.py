"""Where the table of step costs comes from: the operator, an earlier start, or this one.

All ranks of a server decide by one table, that of the first rank.
"""

import hashlib
import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group

from dspark.kernels.collective import Group
from dspark.speculation import step_cost, step_cost_cache, step_timer
from dspark.speculation.step_cost import Sample, StepCost, TableError

logger = logging.getLogger(__name__)

# What changes the time of a step, besides machine and checkpoint.
FLAGS = (
    "tp_size",
    "speculative_num_draft_tokens",
    "max_running_requests",
    "context_length",
    "disable_cuda_graph",
    "cuda_graph_config",
    "disable_overlap_schedule",
)
VARIABLES = ("DSPARK_TUNED", "DSPARK_KERNELS", "DSPARK_KEEP_REJECTED", "STATE_DEBUG")


def describe(server_args, device: torch.device | str) -> dict[str, Any]:
    """What a measured table holds for; JSON values."""
    draft = server_args.speculative_draft_model_path
    return {
        "versions": {
            name: importlib.metadata.version(name) for name in ("sglang-dspark", "sglang", "torch")
        },
        "machine": machine(torch.device(device)),
        "checkpoints": [checkpoint(path) for path in (server_args.model_path, draft) if path],
        "flags": {name: str(getattr(server_args, name)) for name in FLAGS},
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }


def machine(device: torch.device) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    if device.type == "cuda":
        return {"card": torch.cuda.get_device_name(device), "cores": cores}
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = sorted({line.partition(":")[2].strip() for line in lines if "model name" in line})
    return {"cpu": names, "cores": cores, "threads": torch.get_num_threads()}


def checkpoint(path: str) -> dict[str, Any]:
    """A directory by its files' names, sizes and configuration; a name of the hub by itself."""
    directory = Path(path)
    if not directory.is_dir():
        return {"path": path}
    known = hashlib.sha256((directory / "config.json").read_bytes())
    for file in sorted(file for file in directory.iterdir() if file.is_file()):
        known.update(f"{file.name} {file.stat().st_size}\n".encode())
    return {"path": str(directory.resolve()), "files": known.hexdigest()}


def find_kept(description: dict[str, Any], group: Group) -> StepCost | None:
    return _of_first_rank(lambda: step_cost_cache.find(description), group)


def made(
    samples: Iterable[Sample], depth: int, description: dict[str, Any], group: Group
) -> StepCost | None:
    """The table of these steps, kept for the next start; None, with one line, if there is none."""

    def make() -> StepCost | None:
        whole = step_timer.complete(samples, depth)
        try:
            cost = step_cost.from_samples(whole)
        except TableError as error:
            logger.warning("Steps could not be measured, everything is verified: %s", error)
            return None
        file = step_cost_cache.keep(description, cost)
        logger.info(
            "Measured %d steps of batches of %s requests. Kept: %s.",
            len(whole),
            ", ".join(str(steps.requests) for steps in cost),
            file,
        )
        return cost

    return _of_first_rank(make, group)


def _of_first_rank(make: Callable[[], StepCost | None], group: Group) -> StepCost | None:
    if group is None:
        return make()
    return get_tp_group().broadcast_object(make() if group.rank() == 0 else None)
