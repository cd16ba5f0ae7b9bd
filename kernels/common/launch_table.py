"""Launch configurations: how each kernel is launched, fixed at build time.

Every family's `kernel.py` holds a `LAUNCH: dict[str, LaunchConfig]`, what its wrappers launch.
There is no autotuner: timing noise must never choose the order of a sum.
"""

import importlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dspark.kernels.common.sources import source_sha256

FAMILIES = (
    "accept",
    "attention",
    "collective",
    "compress",
    "draft",
    "hyper",
    "indexer",
    "linear",
    "moe",
    "qkv",
    "sampling",
    "schedule",
    "state",
    "step",
)


class LaunchConfig(NamedTuple):
    """Compile-time choices of one kernel."""

    num_warps: int
    num_stages: int
    constexprs: Mapping[str, int]  # block sizes and other tl.constexpr arguments

    @property
    def keywords(self) -> dict[str, int]:
        """All of them, as a launch takes them."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **self.constexprs}


def configurations() -> dict[str, LaunchConfig]:
    """Every launch configuration, "family.op" -> LaunchConfig. A view for reports and tuners."""
    return {
        f"{family}.{op}": config
        for family in FAMILIES
        for op, config in _kernel_module(family).LAUNCH.items()
    }


def load_winner(path: Path, sm: int) -> bool:
    """Use the configuration a tuning session found, in this process; call it before any launch.

    path: `winner.json` with `schema` 1, `op` ("family.op"), `sm`, `source_sha256` of the family
    and `config` {num_warps, num_stages, constexprs}. A file for another schema, card or kernel
    source is ignored with a warning that says why. True when it was taken.
    """
    winner = json.loads(path.read_text())
    config = winner.get("config")
    family, _, op = str(winner.get("op")).partition(".")
    known = family in FAMILIES and op in _kernel_module(family).LAUNCH
    reason = None
    if winner.get("schema") != 1:
        reason = f"its schema is {winner.get('schema')}, not 1"
    elif not known:
        reason = f"there is no op {winner.get('op')!r}"
    elif winner.get("sm") != sm:
        reason = f"it was tuned for sm_{winner.get('sm')}, this is sm_{sm}"
    elif winner.get("source_sha256") != source_sha256(family):
        reason = "the kernel has changed since"
    elif not isinstance(config, dict) or config.keys() != set(LaunchConfig._fields):
        reason = f"its config does not consist of {', '.join(LaunchConfig._fields)}"
    elif config["constexprs"].keys() != _kernel_module(family).LAUNCH[op].constexprs.keys():
        reason = "it sets other constants than the kernel has"
    if reason is not None:
        warnings.warn(f"{path}: tuned configuration ignored, {reason}", stacklevel=2)
        return False
    _kernel_module(family).LAUNCH[op] = LaunchConfig(**config)
    return True


def _kernel_module(family: str) -> Any:
    return importlib.import_module(f"dspark.kernels.{family}.kernel")
