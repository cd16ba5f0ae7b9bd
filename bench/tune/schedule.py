"""The order in which a session measures: fixed by a seed, balanced between the two arms."""

import hashlib
import random
from typing import NamedTuple


class Pair(NamedTuple):
    """One paired sample: both arms back to back, in this order."""

    case: str
    number: int
    order: str  # "AB": incumbent first, "BA": candidate first


def generator(seed: int, *parts: str) -> random.Random:
    """A generator that depends on its arguments only, in any process."""
    digest = hashlib.sha256("|".join([str(seed), *parts]).encode()).digest()
    return random.Random(int.from_bytes(digest, "big"))


def balanced_orders(seed: int, op: str, case: str, candidate: str, pairs: int) -> list[str]:
    """`pairs` orders with as many AB as BA (one more AB when odd), shuffled.

    A drift that favours whatever runs second then cancels within every case.
    """
    orders = ["AB"] * (pairs - pairs // 2) + ["BA"] * (pairs // 2)
    generator(seed, op, case, candidate).shuffle(orders)
    return orders


def pair_plan(seed: int, op: str, candidate: str, cases: list[str], pairs: int) -> list[Pair]:
    """All pairs of one candidate: cases in shuffled order, orders balanced within each."""
    shuffled = list(cases)
    generator(seed, op, candidate).shuffle(shuffled)
    return [
        Pair(case, i, order)
        for case in shuffled
        for i, order in enumerate(balanced_orders(seed, op, case, candidate, pairs))
    ]
