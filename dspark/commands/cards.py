"""Cards that `dspark plan` knows by name: what their makers say, and what an idle one has free."""

from typing import NamedTuple


class CardModel(NamedTuple):
    capability: tuple[int, int]
    free: float  # GiB of an idle card, after the driver and error correction took theirs
    bandwidth: int  # GB/s of its memory, from the data sheet


CARDS = {
    "4090": CardModel((8, 9), 23.5, 1008),
    "4090-48gb": CardModel((8, 9), 47.3, 1008),
    "l4": CardModel((8, 9), 22.0, 300),
    "l20": CardModel((8, 9), 44.5, 864),
    "l40s": CardModel((8, 9), 44.3, 864),
    "6000-ada": CardModel((8, 9), 47.3, 960),
    "5090": CardModel((12, 0), 31.3, 1792),
    "pro-6000": CardModel((12, 0), 94.5, 1792),
    "h200": CardModel((9, 0), 139.0, 4800),
}
