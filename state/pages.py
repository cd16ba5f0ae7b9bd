"""Clearing the rows of released pages and reassigned slots, at the one safe moment.

A release says "no later forward uses this page", but forwards already launched may still read and
write it. So a release only records; the clear is launched at the head of the next forward, on the
forward stream, behind everything launched before and ahead of any new owner.
"""

import torch
from torch import Tensor

from dspark.kernels.state import clear_pages, clear_slots
from dspark.state.errors import PageError
from dspark.state.pools import StatePools
from dspark.state.slots import SlotTable
from dspark.state.upload import IndexUpload


class PageClearer:
    """Records released window pages; clears them, and queued slots, when told to flush."""

    def __init__(self, pools: StatePools, slots: SlotTable, debug: bool = False):
        self._pools = pools
        self._slots = slots
        self._debug = debug
        self._device = pools.tensors["c4"].device
        self._upload = IndexUpload(pools.geometry.slots, self._device)
        self._pending: list[Tensor] = []
        self._forward_stream: torch.cuda.Stream | None = None

    @property
    def pending(self) -> list[Tensor]:
        """Page ids whose clear has been recorded but not launched."""
        return list(self._pending)

    def release(self, pages: Tensor) -> None:
        """Record int [n] page ids on the state's device; ids <= 0 are ignored by the kernel."""
        if pages.numel():
            self._pending.append(pages)

    def reset(self) -> None:
        """Flush: every page is released."""
        pages = self._pools.geometry.swa_pages
        self._pending = [torch.arange(1, pages + 1, device=self._device)]

    def flush(self) -> int:
        """Launch the recorded clears on the current stream; returns the launches (0, 1 or 2)."""
        geometry, tensors = self._pools.geometry, self._pools.tensors
        launches = 0
        if self._pending:
            pages = torch.cat(self._pending) if len(self._pending) > 1 else self._pending[0]
            self._pending = []
            if pages.is_cuda:  # recorded on the scheduling stream, read on this one
                pages.record_stream(torch.cuda.current_stream())
            clear_pages([tensors["c4"], tensors["idx"]], pages, ring=geometry.c4.ring)
            launches += 1
        slots = self._slots.take_pending()
        if slots:
            clear_slots(tensors["c128"], self._upload(slots), ring=geometry.c128.ring)
            launches += 1
        return launches

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

    def attach_allocator(self, swa_alloc) -> None:
        """Follow SGLang's physical window allocator.

        Every way a window page can be released (request end, window eviction, prefix cache,
        grouped frees, failed host load, flush) ends in its `_release_page_ids` or `clear`.
        """
        release, clear = swa_alloc._release_page_ids, swa_alloc.clear

        def release_and_record(*page_ids: Tensor) -> None:
            if self._debug:
                refuse_unowned(swa_alloc, torch.cat(page_ids))
            for pages in page_ids:
                self.release(pages)
            release(*page_ids)

        def clear_and_record() -> None:
            clear()
            self.reset()

        swa_alloc._release_page_ids, swa_alloc.clear = release_and_record, clear_and_record


def refuse_unowned(swa_alloc, pages: Tensor) -> None:
    """Raise PageError for a page that is free already or out of range (debug only: it waits)."""
    free = set(torch.cat([swa_alloc.free_pages, swa_alloc.release_pages]).tolist())
    seen: set[int] = set()
    for page in pages.tolist():
        if page in free or page in seen or not 0 < page <= swa_alloc.num_pages:
            raise PageError(f"window page {page} is released but nobody owns it")
        seen.add(page)
