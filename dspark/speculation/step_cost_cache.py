"""Step cost tables on disk, so that a server measures its machine once.

A table belongs to a description: machine, checkpoint and flags. Its file is named by a hash of it
and holds it too. A file that cannot be used is ignored with one line; it is never a reason not to
start.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.speculation import step_cost
from dspark.speculation.step_cost import StepCost, TableError

logger = logging.getLogger(__name__)

Description = Mapping[str, Any]  # JSON values


def directory() -> Path:
    """Where this user's caches are."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang-dspark"


def file_of(description: Description) -> Path:
    digest = hashlib.sha256(_canonical(description).encode()).hexdigest()
    return directory() / f"step-cost-{digest[:16]}.json"


def find(description: Description) -> StepCost | None:
    """The table measured for this description, if there is one."""
    file = file_of(description)
    try:
        content = json.loads(file.read_text())
        if _canonical(content["measured_on"]) != _canonical(description):
            raise TableError(f"{file} was measured elsewhere.")
        return step_cost.from_json(content, file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("A step cost table in the cache is ignored: %s", _in_a_line(error, file))
        return None


def keep(description: Description, cost: StepCost) -> Path | None:
    """Write it whole or not at all; None, with one line, where that cannot be done."""
    file = file_of(description)
    content = {"measured_on": description, **step_cost.as_json(cost)}
    part = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(file)
    except OSError as error:
        logger.warning("The step cost table is not kept: %s", _in_a_line(error, file))
        return None
    return file


def _canonical(description: Description) -> str:
    return json.dumps(description, sort_keys=True)


def _in_a_line(error: Exception, file: Path) -> str:
    if isinstance(error, TableError):
        return str(error)
    return f"{file}: {error!r}."
