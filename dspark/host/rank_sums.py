"""How this server's ranks sum: chosen once at start, said in the log and in `/server_info`."""

import logging

import torch
from torch import distributed as dist

from dspark.kernels.collective import GATHERED_ROWS, host_start
from dspark.kernels.collective.host_layout import MOST_ROWS
from dspark.kernels.collective.host_sum import CHOSEN

logger = logging.getLogger(__name__)


def choose(group: dist.ProcessGroup | None, device: torch.device, columns: int) -> None:
    """Called by all ranks at once, when weights are loaded and no graph is captured yet.

    columns: of the model's rows. Ranks on the CPU have nothing to choose, one rank nothing to sum.
    """
    if group is None or device.type != "cuda":
        return
    try:
        outcome = host_start.set_up(group, device, columns)
    except Exception as error:  # there is another way to sum
        outcome = host_start.Outcome(None, host_start.one_line(error))
    if group.rank() == 0:
        why = f" ({outcome.reason})" if outcome.reason else ""
        logger.info("Sums over %d ranks: %s%s.", group.size(), transport(group), why)


def transport(group: dist.ProcessGroup | None) -> str:
    """What carries the sums, in words."""
    if group is None:
        return "none, one rank"
    if group in CHOSEN:
        return f"host memory up to {MOST_ROWS} rows, column slices from there on"
    return f"gathered up to {GATHERED_ROWS} rows, column slices from there on"
