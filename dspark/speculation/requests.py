"""The running requests as one decode step sees them."""

from typing import NamedTuple

import torch

from dspark.speculation.sampling import RequestParams


class Requests(NamedTuple):
    """R requests; everything but `params` lies on the device."""

    slot: torch.Tensor  # i64 [R] request slots
    committed: torch.Tensor  # i64 [R] committed length; the bonus token sits at this position
    bonus: torch.Tensor  # i64 [R] last emitted token, which no forward has seen yet
    seed: torch.Tensor  # i64 [R]
    params: RequestParams
