"""A small trained checkpoint that ships with the package, so that anyone can try real text.

`checkpoint/` is in the official format (FP8, MXFP4, three DSpark stages); `MODEL_CARD.md` says how
it was trained and how well it does.
"""

import json
from pathlib import Path

DIRECTORY = Path(__file__).parent


def checkpoint() -> Path:
    """Directory to pass to `--model-path`."""
    return DIRECTORY / "checkpoint"


def calibration() -> Path:
    """Temperatures of its confidence head, for `DSPARK_CALIBRATION`."""
    return DIRECTORY / "confidence.json"


def step_cost() -> Path:
    """What its steps cost on a two-core CPU, for `DSPARK_STEP_COST`."""
    return DIRECTORY / "step_cost.json"


def held_out() -> dict[str, list[str]]:
    """Prompts that are not in its training data: 16 of `code`, 8 of `prose` (PSF-2.0)."""
    content = json.loads((DIRECTORY / "held_out.json").read_text())
    return {kind: content[kind] for kind in ("code", "prose")}
