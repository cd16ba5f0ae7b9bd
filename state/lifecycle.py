"""The one object the rest of the server holds to keep the model's state sound."""

import os

import torch

from dspark.state.geometry import StateGeometry
from dspark.state.pages import PageClearer
from dspark.state.pools import StatePools
from dspark.state.rollback import RingRollback
from dspark.state.slots import SlotTable


def debug_enabled() -> bool:
    """STATE_DEBUG=1: check ownership at every release and all invariants after every step."""
    return os.environ.get("STATE_DEBUG", "0") not in ("", "0")


class StateLifecycle:
    """Slots, compress rings, rollback and clearing of one model.

    Writing before reading is what makes state correct: every raw row a later window can read has
    been stored by its present owner. Clearing is the second net under it.

    Raises StateGeometryError if the sizes could corrupt state.
    """

    def __init__(
        self,
        geometry: StateGeometry,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        debug: bool | None = None,
    ):
        geometry.check()
        self.geometry = geometry
        self.debug = debug_enabled() if debug is None else debug
        self.pools = StatePools(geometry, device, dtype)
        self.slots = SlotTable(geometry.slots)
        self.rollback = RingRollback(self.pools)
        self.pages = PageClearer(self.pools, self.slots, self.debug)

    def begin_forward(self) -> int:
        """Head of every forward, on its stream: launch the recorded clears (0, 1 or 2)."""
        return self.pages.begin_forward()

    def reset(self) -> None:
        """Flush: no owner survives, and every row is cleared at the head of the next forward."""
        self.slots.reset()
        self.pages.reset()

    def resume(self) -> None:
        """The pools' memory came back with undefined content (memory saver): empty all of it.

        Nothing can be in flight on memory that did not exist, so this need not wait.
        """
        self.pools.reset()
        self.reset()
