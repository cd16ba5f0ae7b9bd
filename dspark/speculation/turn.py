"""What a decode step does, as far as the host decides it before the step is launched."""

from typing import NamedTuple


class Turn(NamedTuple):
    draft: bool
    explore: bool = False  # believe in the drafts, whatever was known of their confidences
    counts: bool = False  # its result says whether drafting pays
    measured: int | None = None  # drafts of each request to run and not to accept


DRAFT = Turn(draft=True)
NO_DRAFT = Turn(draft=False)
