"""What every row and entry must be: a dictionary of positions to values, kept the slow way.

The value of a position is a hash of all tokens up to it, small enough to be exact in fp32. Equal
prefixes give equal values; a rejected draft gives another one.
"""

import numpy as np

VOCABULARY = 97
VALUES = 1 << 21  # values are 1..VALUES; layer l adds l * VALUES and stays exact in fp32
WORD = (1 << 64) - 1


def step(state: int, token: int) -> int:
    return (state * 6364136223846793005 + (token + 1) * 1442695040888963407) & WORD


def value(state: int) -> int:
    return (state >> 43) % VALUES + 1


class Sequence:
    """A prompt and the continuation the target model would give it, extended on demand."""

    def __init__(self, prompt: list[int]):
        self.tokens = list(prompt)
        self.states: list[int] = []  # hash after each token
        self.values: list[int] = []
        self._hash(len(prompt))

    def upto(self, length: int) -> "Sequence":
        """Make positions 0..length-1 known."""
        while len(self.tokens) < length:
            self.tokens.append(self.states[-1] % VOCABULARY if self.states else 0)
            self._hash(len(self.tokens))
        return self

    def drafted(self, start: int, commit: int, rows: int) -> np.ndarray:
        """f32 [start + rows]: values when of rows start.. only the first `commit` are right."""
        self.upto(start + rows)
        right = start + commit
        state = self.states[right - 1]
        wrong = []
        for pos in range(right, start + rows):
            state = step(state, (self.tokens[pos] + 1) % VOCABULARY)
            wrong.append(value(state))
        return np.array(self.values[:right] + wrong, dtype=np.float32)

    def page_key(self, page: int, size: int) -> int:
        """Identity of the prefix that ends with this page."""
        return self.states[(page + 1) * size - 1]

    def _hash(self, length: int) -> None:
        while len(self.states) < length:
            before = self.states[-1] if self.states else 1
            self.states.append(step(before, self.tokens[len(self.states)]))
            self.values.append(value(self.states[-1]))


def c4_entries(values: np.ndarray) -> np.ndarray:
    """[n // 4, 8] terms of every closed C4 entry: -A of the older group, B of the newer one.

    A term below position 0 is 0. The overlap half of a row carries the negative value.
    """
    count = len(values) // 4
    groups = values[: count * 4].reshape(count, 4)
    older = np.concatenate([np.zeros((min(count, 1), 4), np.float32), -groups[:-1]])
    return np.concatenate([older, groups], 1)


def c128_entries(values: np.ndarray) -> np.ndarray:
    """[n // 128, 128] terms of every closed C128 entry."""
    count = len(values) // 128
    return values[: count * 128].reshape(count, 128)


def salted(terms: np.ndarray, layer: int) -> np.ndarray:
    """Terms as layer `layer` stores them; empty terms stay 0."""
    return np.where(terms == 0, 0, terms + np.sign(terms) * layer * VALUES)
