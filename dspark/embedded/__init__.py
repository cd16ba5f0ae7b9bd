"""A small trained checkpoint that ships with the package, so that anyone can try real text.

`checkpoint/` is in the official format (FP8, MXFP4, three DSpark stages); `MODEL_CARD.md` says how
it was trained and how well it does.
"""

from pathlib import Path

DIRECTORY = Path(__file__).parent
KINDS = ("terse code", "typed code", "prose", "Chinese")
SEPARATOR = "\n%%%%\n"  # between the prompts of a file


def checkpoint() -> Path:
    """Directory to pass to `--model-path`."""
    return DIRECTORY / "checkpoint"


def calibration() -> Path:
    """Temperatures of its confidence head, for `--dspark-calibration`."""
    return DIRECTORY / "confidence.json"


def step_cost() -> Path:
    """What its steps cost on a two-core CPU, for `--dspark-step-cost`."""
    return DIRECTORY / "step_cost.json"


def held_out() -> dict[str, list[str]]:
    """Prompts by kind, written for this project, so that none is in its training data."""
    return {kind: _prompts(kind) for kind in KINDS}


def _prompts(kind: str) -> list[str]:
    file = DIRECTORY / "prompts" / f"{kind.lower().replace(' ', '_')}.txt"
    return file.read_text(encoding="utf-8").removesuffix("\n").split(SEPARATOR)
