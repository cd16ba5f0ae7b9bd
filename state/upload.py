"""Small index lists from the host to the device without waiting for it."""

import torch
from torch import Tensor

BUFFERS = 3  # steps that may be in flight before a buffer is written again, and one to spare


class IndexUpload:
    """Uploads int32 lists through a ring of pinned buffers guarded by events."""

    def __init__(self, capacity: int, device: torch.device):
        self._device = device
        self._next = 0
        if device.type == "cuda":
            self._buffers = [
                torch.empty(capacity, dtype=torch.int32, pin_memory=True) for _ in range(BUFFERS)
            ]
            self._copied = [torch.cuda.Event() for _ in range(BUFFERS)]

    def __call__(self, indices: list[int]) -> Tensor:
        """i32 [n] on the device, ordered on the current stream."""
        host = torch.tensor(indices, dtype=torch.int32)
        if self._device.type != "cuda":
            return host.to(self._device)
        buffer, copied = self._buffers[self._next], self._copied[self._next]
        self._next = (self._next + 1) % BUFFERS
        copied.synchronize()  # long past, unless the device is BUFFERS uploads behind
        buffer[: len(indices)].copy_(host)
        on_device = buffer[: len(indices)].to(self._device, non_blocking=True)
        copied.record()
        return on_device
