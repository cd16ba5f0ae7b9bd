"""The one object the rest of the server holds to keep the model's state sound."""

import logging
import os
from collections.abc import Callable

import torch
from torch import Tensor

from dspark.kernels.step import StepMeta
from dspark.state import check
from dspark.state.errors import StateInvariantError
from dspark.state.geometry import StateGeometry
from dspark.state.pages import PageClearer
from dspark.state.pools import StatePools
from dspark.state.rollback import RingRollback
from dspark.state.slots import SlotTable
from dspark.state.tags import RowTags

logger = logging.getLogger(__name__)


def debug_enabled() -> bool:
    """STATE_DEBUG=1: check ownership at every release and all invariants after every step."""
    return os.environ.get("STATE_DEBUG", "0") not in ("", "0")


def within_memory(run_check: Callable[[], None]) -> None:
    """Run a check; where memory does not suffice for it, say so and go on serving."""
    try:
        run_check()
    except (MemoryError, torch.OutOfMemoryError) as error:
        logger.warning("State check left out, there is not enough memory for it: %s", error)


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
        debug: bool | None = None,
    ):
        geometry.check()
        self.geometry = geometry
        self.pools = StatePools(geometry, device)
        self.slots = SlotTable(geometry.slots)
        debug = debug_enabled() if debug is None else debug
        self.tags = RowTags(geometry, self.slots) if debug else None
        self.rollback = RingRollback(self.pools, self.tags)
        self.pages = PageClearer(self.pools, self.slots, self.tags)
        self._seen = self.slots.generation.clone()
        self._checked = True  # since the last forward

    def begin_forward(self) -> int:
        """Head of every forward, on its stream: launch the recorded clears (0, 1 or 2).

        With STATE_DEBUG=1 this is also where the step before is checked.
        """
        if self.tags is not None:
            within_memory(self.check)
        self._checked = False
        return self.pages.begin_forward()

    def observe(self, meta: StepMeta, request_slot: Tensor) -> None:
        """With STATE_DEBUG=1: check the rows this planned forward will read; else nothing.

        Call between `begin_forward` and the first layer. request_slot: int [R].
        Raises StateInvariantError.
        """
        if self.tags is not None:
            self.tags.observe(meta, request_slot)

    def check(self) -> None:
        """Check every invariant between two forwards; waits for the device.

        Raises StateInvariantError naming kind, layer, slot or page, generation or epoch and row.
        """
        self.check_tables()
        check.check_padding(self.pools)
        check.check_rows_whole(self.pools, self.slots)
        free = self.pages.free_list()
        if free is not None:
            pending = torch.cat([torch.empty(0, dtype=torch.int64), *self.pages.pending_on_host()])
            check.check_free_pages_empty(self.pools, free, pending)
        if self.tags is not None and self.tags.observing:
            check.check_tags(self.pools, self.slots, self.tags)

    def check_tables(self) -> None:
        """Check what the host knows: generations, free slots, free pages; no ring is read.

        Raises StateInvariantError naming slot or page.
        """
        check.check_slots(self.slots, self._seen, self.slots.free_list())
        self._seen = self.slots.generation.clone()
        free = self.pages.free_list()
        if free is not None:
            check.check_free_list(self.geometry.window_pages, free)

    def check_when_idle(self) -> None:
        """Check once after the last forward: the tables, and in debug mode the rings as well.

        A violation is logged, and raised in debug mode. A server that found its state wrong can
        still refuse less than a server that ended.
        """
        if self._checked:
            return
        self._checked = True
        try:
            within_memory(self.check_tables if self.tags is None else self.check)
        except StateInvariantError as error:
            if self.tags is not None:
                raise
            logger.error("State check while idle: %s", error)

    def reset(self) -> None:
        """Flush: no owner survives, and every row is cleared at the head of the next forward."""
        self.slots.reset()
        self.pages.reset()

    def resume(self) -> None:
        """The pools' memory came back with undefined content (memory saver): empty all of it.

        Nothing can be in flight on memory that did not exist, so this need not wait.
        """
        self.pools.reset()
        if self.tags is not None:
            self.tags.cleared_all()
        self.reset()
