"""Count the Triton kernels an operation launches, for launch budgets and reports."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton import knobs


@contextmanager
def count_launches() -> Iterator[Counter[str]]:
    """Kernel name -> launches inside the `with` block; torch kernels are not counted.

    A CUDA graph launches nothing through Triton: count while capturing it.
    """
    counts: Counter[str] = Counter()

    def note(metadata: Any) -> None:
        counts[metadata.get()["name"]] += 1

    knobs.runtime.launch_enter_hook.add(note)
    try:
        yield counts
    finally:
        knobs.runtime.launch_enter_hook.remove(note)
