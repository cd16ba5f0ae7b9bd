"""What rows attend to."""

from typing import NamedTuple

from torch import Tensor


class SlotList(NamedTuple):
    """Slots of one pool, a list for each row."""

    pool: Tensor  # [pages, stride] packed, or plain for the reference (`common.kv_pages`)
    per_page: int  # slots of a page
    idx: Tensor  # i32 [T, N], any N; -1 entries are skipped
    length: Tensor  # i32 [T] places in use

    def rows(self, rows: slice) -> "SlotList":
        return self._replace(idx=self.idx[rows], length=self.length[rows])
