"""The host side of a tiered cache: a mirror of page-shaped device memory.

Implements what SGLang's `HostPoolGroup` and `HybridCacheController` call, with plain tensor copies,
so that the same code moves pages on a GPU (pinned memory, copies on the controller's streams) and
on the CPU, where SGLang's own host pools have no kernels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class PageHostPool:
    """Host copies of pages; a page is `page_size` consecutive slots.

    device_pages: one u8 [pages, bytes] view per layer of the device memory to mirror.
    pages: capacity on the host.
    """

    layout = "layer_first"
    device = "cpu"
    dtype = torch.uint8
    can_use_write_back_jit = False

    def __init__(self, device_pages: Sequence[Tensor], pages: int, page_size: int):
        self.device_pages = list(device_pages)
        self.page_size = page_size
        self.size = self.logical_size = pages * page_size
        pinned = self.device_pages[0].is_cuda
        self.kv_buffer = [
            torch.empty(pages, layer.shape[1], dtype=torch.uint8, pin_memory=pinned)
            for layer in self.device_pages
        ]
        self.clear()

    def clear(self) -> None:
        self.free_slots = torch.arange(self.size)

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, need_size: int) -> Tensor | None:
        """i64 [need_size] host slots in whole pages, None when there are too few."""
        if need_size % self.page_size:
            raise ValueError(f"host slots come in pages of {self.page_size}, got {need_size}")
        if need_size > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:need_size], self.free_slots[need_size:]
        return taken

    def free(self, indices: Tensor) -> int:
        self.free_slots = torch.cat([self.free_slots, indices.cpu()])
        return len(indices)

    def backup_from_device_all_layer(
        self, device_pool, host_indices: Tensor, device_indices: Tensor, io_backend: str
    ) -> None:
        """Copy whole pages to the host, all layers, on the current stream."""
        for host, device in self._pages(host_indices, device_indices):
            for copy, layer in zip(self.kv_buffer, self.device_pages, strict=True):
                copy[host].copy_(layer[device], non_blocking=True)

    def load_to_device_per_layer(
        self,
        device_pool,
        host_indices: Tensor,
        device_indices: Tensor,
        layer_id: int,
        io_backend: str,
    ) -> None:
        """Copy whole pages of one layer to the device, on the current stream."""
        for host, device in self._pages(host_indices, device_indices):
            layer = self.device_pages[layer_id]
            layer[device].copy_(self.kv_buffer[layer_id][host], non_blocking=True)

    def _pages(self, host_indices: Tensor, device_indices: Tensor) -> list[tuple[int, int]]:
        """(host page, device page) of each page; both index lists are on the host."""
        pages = []
        for indices in (host_indices, device_indices):
            first = indices.view(-1, self.page_size)[:, 0]
            pages.append((first // self.page_size).tolist())
        return list(zip(*pages, strict=True))
