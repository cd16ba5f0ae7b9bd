"""The way of weights from mapped files to a device, with host memory of a fixed size."""

import torch

from dspark.target.checkpoint.formats import E8M0_NAN
from dspark.target.checkpoint.reader import WINDOW, CheckpointError, Stored

BUFFERS = 2  # one is filled while the other is on its way


class Staging:
    """Copies parts of stored tensors to one device.

    On CUDA a part goes through pinned buffers of `WINDOW` bytes, so that the device reads one while
    the next is filled; a CPU's weights are copied in one go.

    Attributes:
        nbytes: bytes taken from the files so far.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.nbytes = 0
        self._next = 0
        if device.type == "cuda":
            self._buffers = [
                torch.empty(WINDOW, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS)
            ]
            self._copied = [torch.cuda.Event() for _ in range(BUFFERS)]

    def load(self, into: torch.Tensor, stored: Stored, part: tuple[slice, ...]) -> None:
        """Fill `into`, on the device and of the part's shape, ordered on the current stream.

        into: of the stored dtype, or u8 where that has one byte.

        Raises:
            CheckpointError: an E8M0 scale of the part is NaN (byte 255).
        """
        for rows, window in stored.windows(part):
            if stored.spec.dtype == "F8_E8M0" and (window.view(torch.uint8) == E8M0_NAN).any():
                raise CheckpointError(
                    f"Tensor {stored.name} contains scale byte 255, which is NaN."
                )
            self.nbytes += window.numel() * window.itemsize
            self._copy(into[rows], window.view(into.dtype))

    def _copy(self, into: torch.Tensor, window: torch.Tensor) -> None:
        if self.device.type != "cuda":
            into.copy_(window)
            return
        buffer, copied = self._buffers[self._next], self._copied[self._next]
        self._next = (self._next + 1) % BUFFERS
        copied.synchronize()
        nbytes = window.numel() * window.itemsize
        host = buffer[:nbytes].view(window.dtype).view(window.shape)
        host.copy_(window)
        into.copy_(host, non_blocking=True)
        copied.record()
