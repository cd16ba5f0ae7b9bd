"""Taking back the rejected rows of a verify step."""

from torch import Tensor

from dspark.kernels.state import c128_rollback
from dspark.state.pools import StatePools
from dspark.state.tags import RowTags


class RingRollback:
    """Empties the C128 rows a verify step wrote beyond what it committed.

    Nothing reads those rows before they are written again; emptying them turns a mistake
    elsewhere into a missing token instead of a wrong one. C4 rows need no such net: their window
    is short enough that the next step rewrites them.
    """

    def __init__(self, pools: StatePools, tags: RowTags | None = None):
        self._pools = pools
        self._tags = tags

    def after_verify(
        self, slot: Tensor, committed: Tensor, commit_len: Tensor, rows_run: Tensor
    ) -> None:
        """Empty the rows at offsets [commit_len, rows_run) of each request, in all layers.

        Must run in the step's own epilogue: a row of the next step would be emptied too.

        Args:
            slot: int [B] request slots, -1 = padding.
            committed: int [B] committed lengths BEFORE the step (position of its first row).
            commit_len: int [B] rows the step commits, i.e. accepted drafts + 1.
            rows_run: int [B] rows the step ran.
        """
        geometry = self._pools.geometry
        c128_rollback(
            self._pools.tensors["c128"],
            slot,
            committed,
            commit_len,
            rows_run,
            ring=geometry.c128.ring,
            verify_width=geometry.verify_width,
        )
        if self._tags is not None:
            self._tags.rolled_back(slot, committed, commit_len)
