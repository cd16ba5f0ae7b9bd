"""Token slots for the full and the window pool: what SGLang's own allocators lack.

* Released window pages reach the state life cycle, which clears their rows.
* On the CPU, SGLang's paged allocators launch Triton; ours compute the same slots in torch.
* A free inside a free group is translated from full to window slots when it is *requested*.
  SGLang translates when the group ends, by which time the prefix cache may have pointed the same
  full slots at replacement pages, and would then release pages that are in use.
"""

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.utils import get_num_new_pages

from dspark.state import PageClearer


def extend_slots(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page: int,
    total: int,
) -> torch.Tensor:
    """Token slots for positions prefix_lens..seq_lens-1 of each request, request after request.

    The open page of a request continues after `last_loc`; further pages come from the head of
    `free_pages` in request order.

    Args:
        prefix_lens, seq_lens, last_loc: int [R]; last_loc is the token slot of the
            position before the first.
        free_pages: i64 [F] page ids.
        total: sum of the lengths.

    Returns:
        i64 [total].
    """
    committed, seq = prefix_lens.to(torch.int64), seq_lens.to(torch.int64)
    lengths = seq - committed
    owner = torch.repeat_interleave(torch.arange(len(seq)), lengths, output_size=total)
    start = lengths.cumsum(0) - lengths
    pos = committed[owner] + torch.arange(total) - start[owner]
    opened = (committed + page - 1) // page  # pages the request already holds
    needed = (seq + page - 1) // page - opened
    first = needed.cumsum(0) - needed
    ordinal = pos // page - opened[owner]
    fresh = free_pages[(first[owner] + ordinal).clamp(0, max(len(free_pages) - 1, 0))]
    continued = last_loc.to(torch.int64)[owner] + 1 + pos - committed[owner]
    return torch.where(ordinal >= 0, fresh * page + pos % page, continued)


class HostPagedAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's paged allocator with its two Triton kernels written in torch."""

    free_pages: torch.Tensor  # i64, page ids

    def alloc_extend(
        self,
        prefix_lens,
        prefix_lens_cpu,
        seq_lens,
        seq_lens_cpu,
        last_loc,
        extend_num_tokens,
        num_new_pages=None,
    ):
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if num_new_pages > len(self.free_pages):
            return None
        slots = extend_slots(
            prefix_lens, seq_lens, last_loc, self.free_pages, self.page_size, extend_num_tokens
        )
        self.free_pages = self.free_pages[num_new_pages:]
        return slots

    def alloc_decode(self, seq_lens, seq_lens_cpu, last_loc):
        return self.alloc_extend(
            seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, len(seq_lens)
        )


class _Reporting(PagedTokenToKVPoolAllocator):
    """Tells the state life cycle which window pages are released.

    Every way a window page can be released (request end, window eviction, prefix cache, grouped
    frees, failed host load, flush) ends in `_release_page_ids` or `clear`.
    """

    _pages: PageClearer | None = None  # the first `clear`, by the constructor, releases nothing

    def report_to(self, pages: PageClearer) -> None:
        self._pages = pages
        pages.allocator = self

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        if self._pages is not None:
            self._pages.refuse_unowned(torch.cat(page_ids))
            for ids in page_ids:
                self._pages.release(ids)
        super()._release_page_ids(*page_ids)

    def clear(self) -> None:
        super().clear()
        if self._pages is not None:
            self._pages.reset()


class WindowAllocator(_Reporting):
    """SGLang's paged allocator of the window pool, reporting."""


class HostWindowAllocator(_Reporting, HostPagedAllocator):
    """The same without Triton."""


class DSparkAllocator(SWATokenToKVPoolAllocator):
    """Full and window slots of the V4 pool; page releases reach the state life cycle."""

    free_group: list[torch.Tensor]

    def __init__(self, size, size_swa, page_size, dtype, device, kvcache, need_sort):
        self._window_group: list[torch.Tensor] = []
        super().__init__(size, size_swa, page_size, dtype, device, kvcache, need_sort)
        on_host = torch.device(device).type == "cpu"
        if on_host:
            self.full_attn_allocator = HostPagedAllocator(
                size, page_size, dtype, device, None, need_sort
            )
        window = HostWindowAllocator if on_host else WindowAllocator
        self.swa_attn_allocator = window(
            size_swa, page_size, dtype, device, kvcache.swa_kv_pool, need_sort
        )
        self.swa_attn_allocator.report_to(kvcache.state.pages)

    def free(self, free_index: torch.Tensor) -> None:
        """Release full slots and the window slots behind them; pages may come in pieces."""
        if free_index.numel() == 0:
            return
        if self.is_not_in_free_group:
            super().free(free_index)
            return
        self._window_group.append(self._take_window_slots(free_index))
        self.free_group.append(free_index)

    def free_group_end(self) -> None:
        self.is_not_in_free_group = True
        full, window = self.free_group, self._window_group
        self.free_group, self._window_group = [], []
        if full:
            self.full_attn_allocator.free(torch.cat(full))
        if window:
            self.swa_attn_allocator.free(torch.cat(window))

    def clear(self) -> None:
        self._window_group = []
        super().clear()

    def _take_window_slots(self, free_index: torch.Tensor) -> torch.Tensor:
        """Window slots of whole pages around `free_index`, unmapped so nobody frees them twice."""
        pages = self._expand_to_full_pages(free_index)
        slots = self.full_to_swa_index_mapping[pages]
        self.full_to_swa_index_mapping[pages] = 0
        return slots[slots > 0]


def build_allocator(configurator, *, sizes, token_to_kv_pool) -> DSparkAllocator:
    """The allocator of the target runner; draft runners share it.

    Args:
        configurator: SGLang's KVCacheConfigurator.
        sizes: its resolved pool sizes, in tokens.
    """
    return DSparkAllocator(
        sizes.full_max_total_num_tokens,
        sizes.swa_max_total_num_tokens,
        page_size=configurator.page_size,
        dtype=configurator.kv_cache_dtype,
        device=configurator.device,
        kvcache=token_to_kv_pool,
        need_sort=False,
    )
