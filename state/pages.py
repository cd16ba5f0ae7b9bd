"""Clearing the rows of released pages and reassigned slots, at the one safe moment.

A release says "no later forward uses this page", but forwards already launched may still read and
write it. So a release only records; the clear is launched at the head of the next forward, on the
forward stream, behind everything launched before and ahead of any new owner.
"""

from typing import Any

import torch
from torch import Tensor

from dspark.kernels.state import clear_pages, clear_slots
from dspark.state.errors import PageError
from dspark.state.pools import StatePools
from dspark.state.slots import SlotTable
from dspark.state.tags import RowTags
from dspark.state.upload import Upload


class PageClearer:
    """Records released window pages; clears them, and queued slots, when told to flush."""

    def __init__(self, pools: StatePools, slots: SlotTable, tags: RowTags | None = None):
        self._pools = pools
        self._slots = slots
        self._tags = tags
        self.allocator: Any = None  # whoever keeps the free window pages and reports releases
        self._device = pools.tensors["c4"].device
        self._upload = Upload(4 * pools.geometry.slots, self._device)
        self._pending: list[Tensor] = []
        self._forward_stream: torch.cuda.Stream | None = None

    def pending_on_host(self) -> list[Tensor]:
        """i64 page ids whose clear has been recorded but not launched; waits for the device."""
        return [pages.cpu().long() for pages in self._pending]

    def free_list(self) -> Tensor | None:
        """i64 [n] free pages as `allocator` has them, None where there is none; waits."""
        if self.allocator is None:
            return None
        return torch.cat([self.allocator.free_pages, self.allocator.release_pages]).cpu()

    def refuse_unowned(self, pages: Tensor) -> None:
        """With STATE_DEBUG=1: raise PageError for a page that is free already or does not exist.

        pages: int [n], about to be released.
        """
        if self._tags is None:
            return
        free = self.free_list()
        assert free is not None
        owned = set(range(1, self.allocator.num_pages + 1)) - set(free.tolist())
        for page in pages.tolist():
            if page not in owned:
                raise PageError(f"window page {page} is released but nobody owns it")
            owned.remove(page)

    def release(self, pages: Tensor) -> None:
        """Record int [n] page ids on the state's device; ids <= 0 are ignored by the kernel."""
        if pages.numel():
            self._pending.append(pages)
            if self._tags is not None:
                self._tags.released(pages)

    def reset(self) -> None:
        """Flush: every page is released."""
        self._pending = []
        self.release(torch.arange(1, self._pools.geometry.window_pages + 1, device=self._device))

    def flush(self) -> int:
        """Launch the recorded clears on the current stream; returns the launches (0, 1 or 2)."""
        launches = 0
        if self._pending:
            self._clear_pages(self._take_pages())
            launches += 1
        slots = self._slots.take_pending()
        if slots:
            self._clear_slots(slots)
            launches += 1
        return launches

    def _take_pages(self) -> Tensor:
        recorded, self._pending = self._pending, []
        for pages in recorded:
            if pages.is_cuda:  # allocated on the scheduling stream, read on this one
                pages.record_stream(torch.cuda.current_stream())
        return torch.cat(recorded)

    def _clear_pages(self, pages: Tensor) -> None:
        tensors = self._pools.tensors
        clear_pages([tensors["c4"], tensors["idx"]], pages, ring=self._pools.geometry.c4.ring)
        if self._tags is not None:
            self._tags.cleared_pages(pages)

    def _clear_slots(self, slots: list[int]) -> None:
        on_device = self._upload(torch.tensor(slots, dtype=torch.int32))
        clear_slots(self._pools.tensors["c128"], on_device, ring=self._pools.geometry.c128.ring)
        if self._tags is not None:
            self._tags.cleared_slots(slots)

    def begin_forward(self) -> int:
        """Flush at the head of a forward; its stream becomes the one `fence` orders against."""
        if self._device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                if self._pending or self._slots.pending:
                    raise PageError("state clears are pending while a CUDA graph is captured")
                return 0
            self._forward_stream = torch.cuda.current_stream()
        return self.flush()

    def fence(self) -> torch.cuda.Event | None:
        """Order a copy engine behind everything launched: flush, then an event to wait for.

        Any writer outside the forward stream (host load, RDMA) must wait for the event before it
        touches a page: a pending clear would otherwise wipe what it wrote, and a step in flight
        could still write under it. None on the CPU, where program order is enough.
        """
        if self._device.type != "cuda":
            self.flush()
            return None
        stream = self._forward_stream or torch.cuda.current_stream()
        # The recorded ids were computed on the caller's stream.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.flush()
            return stream.record_event()

    def loaded(self, window_slot: Tensor) -> None:
        """int [n * page] window slots of whole pages whose rows arrived from the host."""
        if self._tags is not None:
            page = self._pools.geometry.page
            self._tags.loaded(window_slot.view(-1, page)[:, 0] // page)
