"""Row-wise functions applied in chunks, to bound their fp64 temporaries."""

from collections.abc import Callable

import torch
from torch import Tensor

ROW_CHUNK = 512  # rows per fp64 temporary in prefill


def over_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), computed in chunks of rows."""
    if x.shape[0] <= ROW_CHUNK:
        return function(x)
    return torch.cat([function(rows) for rows in x.split(ROW_CHUNK)])
