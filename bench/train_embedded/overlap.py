"""Are the prompts that ship with the embedded checkpoint in its training data?

    python -m dspark.bench.train_embedded.overlap

Rebuilds the corpus from what is installed here and looks for any run of 40 characters of a prompt.
Ends with status 1 and the runs if there are some.
"""

import sys
from collections.abc import Iterable, Iterator

from dspark import embedded
from dspark.bench.train_embedded.corpus import documents

WINDOW = 40
BLOCK = WINDOW // 2  # every window covers a whole block that starts at a multiple of BLOCK


def windows(text: str, width: int) -> Iterator[str]:
    return (text[i : i + width] for i in range(len(text) - width + 1))


def shared_windows(prompts: Iterable[str], texts: Iterable[str]) -> set[str]:
    """Runs of `WINDOW` characters that stand in a prompt and in a text.

    Only blocks of a text at multiples of `BLOCK` are looked up, and the windows around those that
    some prompt holds: a twentieth of all windows.
    """
    prompts = list(prompts)
    wanted = {window for prompt in prompts for window in windows(prompt, WINDOW)}
    parts = {part for prompt in prompts for part in windows(prompt, BLOCK)}
    found: set[str] = set()
    for text in texts:
        for start in range(0, len(text), BLOCK):
            if text[start : start + BLOCK] in parts:
                around = text[max(0, start - BLOCK) : start + 2 * BLOCK]
                found.update(wanted.intersection(windows(around, WINDOW)))
    return found


def main() -> int:
    prompts = [prompt for texts in embedded.held_out().values() for prompt in texts]
    found = shared_windows(prompts, (document.text for document in documents()))
    for window in sorted(found):
        print(repr(window))
    print(f"{len(found)} of the prompts' runs of {WINDOW} characters are in the training data")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
