"""Small tensors from the host to the device without waiting for it."""

import torch
from torch import Tensor

BUFFERS = 3  # steps that may be in flight before a buffer is written again, and one to spare


class Upload:
    """Uploads tensors of up to `capacity` bytes through a ring of pinned buffers with events.

    A copy from pageable memory would wait for the step in flight.
    """

    def __init__(self, capacity: int, device: torch.device):
        self.capacity = capacity
        self._device = device
        self._next = 0
        if device.type == "cuda":
            self._buffers = [
                torch.empty(capacity, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS)
            ]
            self._copied = [torch.cuda.Event() for _ in range(BUFFERS)]

    def __call__(self, host: Tensor) -> Tensor:
        """A copy of a contiguous CPU tensor on the device, ordered on the current stream."""
        if self._device.type != "cuda":
            return host.to(self._device)
        buffer, copied = self._buffers[self._next], self._copied[self._next]
        self._next = (self._next + 1) % BUFFERS
        copied.synchronize()  # long past, unless the device is BUFFERS uploads behind
        pinned = buffer[: host.nbytes].view(host.dtype).view(host.shape)
        on_device = pinned.copy_(host).to(self._device, non_blocking=True)
        copied.record()
        return on_device
