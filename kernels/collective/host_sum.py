"""The sum over ranks of one machine through its memory, for cards without peer access."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from dspark.kernels.collective.host_layout import CHANNELS, MOST_ROWS, Layout, Views, views

# Ranks compile kernels each for itself, some seconds apart.
# Dead and stopped ones the launcher sees sooner.
LIMIT_S = 60.0


class HostSum(NamedTuple):
    """One rank's end. Calls must come in the same order on all ranks, on one stream each.

    Epochs are counted on the device, by the kernel itself, so graphs may replay in any mix.
    """

    views: Views  # of memory that the device can read and write
    layout: Layout
    rank: int
    epochs: Tensor  # i64 [CHANNELS]
    control: Tensor  # i64 [2]: ns to wait at most, 0 = not at all; whether a wait was given up

    def takes(self, partial: Tensor) -> bool:
        """partial: [T, N]."""
        rows, columns = partial.shape
        return (
            rows <= MOST_ROWS
            and columns == self.layout.columns
            and partial.dtype == torch.bfloat16
            and partial.device == self.epochs.device
        )

    def __call__(self, partial: Tensor) -> Tensor:
        """bf16 [T, columns] -> its sum over the ranks, with the bits of `ordered_sum`.

        NaN throughout once a rank has been waited for in vain.
        """
        from dspark.kernels.collective.host_kernel import host_sum  # a CPU loads no kernel

        return host_sum(partial.contiguous(), self.views, self.epochs, self.control, self.rank)

    @property
    def gave_up(self) -> bool:
        """Whether a rank was waited for in vain; asks the device."""
        return bool(self.control[1])

    def wait_at_most(self, seconds: float) -> None:
        """For each rank in each sum from now on; 0 waits for nobody, and sums are meaningless."""
        self.control[0] = int(seconds * 1e9)


def host_sum_of(
    memory: Tensor, layout: Layout, rank: int, device: torch.device, epoch: int = 0
) -> HostSum:
    """memory: u8 [layout.nbytes], page-locked; its flags must be those of `epoch`, 0 at first."""
    epochs = torch.full((CHANNELS,), epoch, dtype=torch.int64, device=device)
    control = torch.tensor([int(LIMIT_S * 1e9), 0], dtype=torch.int64, device=device)
    return HostSum(views(memory, layout), layout, rank, epochs, control)


# What `tp_sum` takes for a group; `host_start.set_up` decides.
CHOSEN: dict[dist.ProcessGroup, HostSum] = {}
