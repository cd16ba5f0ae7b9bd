"""Prompts of the black-box tests: random tokens, so that no two share a prefix by accident."""

import random

VOCAB = 512


def prompt(length: int, seed: int) -> list[int]:
    """Token ids 2.. (0 and 1 begin and end a text)."""
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


# Around the window (128), the index width (16 entries of 4), one page (256) and two.
MIXED = {n: prompt(n, seed=n) for n in (1, 5, 64, 127, 130, 257, 300, 520)}
NEW_TOKENS = 8
