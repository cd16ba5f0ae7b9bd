"""Compute capabilities: on which GPUs the kernels run, and how much is known of them there."""

import enum
from typing import NamedTuple


class Standing(enum.Enum):
    """How far the kernels have come on a capability."""

    TUNED = "tuned"  # written for it: shared memory, tile shapes and instructions are its own
    TESTED = "tested"  # every GPU test has passed on such a card
    COMPILED = "compiled"  # every kernel compiles for it; none has run
    REFUSED = "refused"


class Capability(NamedTuple):
    """One line of the table."""

    cards: str  # examples
    standing: Standing
    why: str  # of a refusal or warning, completes "..., which"


NO_FP8 = "has no instruction that converts to FP8"
NOT_RUN = "every kernel compiles for, but none has run on"
NOT_COMPILED = "no kernel of this package has been compiled for"

CAPABILITIES: dict[tuple[int, int], Capability] = {
    (8, 9): Capability("RTX 4090, L4, L20, L40S, RTX 6000 Ada", Standing.TUNED, ""),
    (9, 0): Capability("H100, H200", Standing.TESTED, ""),
    (12, 0): Capability("RTX 5090, RTX PRO 6000", Standing.COMPILED, NOT_RUN),
    (8, 6): Capability("RTX 3090, A40", Standing.REFUSED, NO_FP8),
    (8, 0): Capability("A100", Standing.REFUSED, NO_FP8),
}
OTHER = Capability("", Standing.REFUSED, NOT_COMPILED)


def look_up(found: tuple[int, int]) -> Capability:
    return CAPABILITIES.get(found, OTHER)


def sentence(found: tuple[int, int]) -> str | None:
    """What is to be said of a GPU with this capability; None where there is nothing."""
    known = look_up(found)
    if not known.why:
        return None
    cards = f" ({known.cards})" if known.cards else ""
    return f"this GPU has compute capability {found[0]}.{found[1]}{cards}, which {known.why}"


def served() -> str:
    """The capabilities that a server starts on, in words: "8.9, 9.0 and 12.0"."""
    *first, last = (
        f"{major}.{minor}"
        for (major, minor), known in sorted(CAPABILITIES.items())
        if known.standing is not Standing.REFUSED
    )
    return f"{', '.join(first)} and {last}"
