"""Launch configurations that a tuning session found better, named by the operator.

`--dspark-tuned` holds the paths of one or more `winner.json`, separated as in PATH. They replace
entries of `dspark.kernels.common.launch_table` when the target is built, before any launch.
"""

import json
import logging
import os
from pathlib import Path

import torch

from dspark import options
from dspark.errors import UsageError
from dspark.kernels.common import launch_table

VARIABLE = "DSPARK_TUNED"
logger = logging.getLogger(__name__)


def files() -> list[Path]:
    """The files that `--dspark-tuned` names.

    Raises:
        UsageError: one of them cannot be read or holds no JSON object.
    """
    named = [Path(name) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    for file in named:
        try:
            content = json.loads(file.read_text())
        except OSError as error:
            raise UsageError(
                f"{options.name(VARIABLE)}: {file} cannot be read: {error.strerror}."
            ) from None
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise UsageError(
                f"{options.name(VARIABLE)}: {file} is not the winner.json of a tuning session."
            )
    return named


def load(device: torch.device) -> list[Path]:
    """Use the configurations in this process; returns the files taken, none on a CPU.

    A file for another card or another kernel source is ignored with a warning that says why.
    """
    named = files()
    if device.type != "cuda":
        return []
    major, minor = torch.cuda.get_device_capability(device)
    taken = [file for file in named if launch_table.load_winner(file, 10 * major + minor)]
    for file in taken:
        logger.info("Launching kernels as tuned in %s.", file)
    return taken
