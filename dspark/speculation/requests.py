"""The running requests as one decode step sees them."""

from typing import NamedTuple

import torch

from dspark.speculation.sampling import RequestParams

BROKEN = -1  # emitted in place of a token that could not be chosen


class Requests(NamedTuple):
    """R requests, on the device but for what the host must know to pick a code path."""

    slot: torch.Tensor  # i64 [R] request slots
    committed: torch.Tensor  # i64 [R] committed length; the bonus token sits at this position
    bonus: torch.Tensor  # i64 [R] last emitted token, which no forward has seen yet
    seed: torch.Tensor  # i64 [R]
    seeded: torch.Tensor  # bool [R] the request itself named the seed
    unseeded: int  # requests that sample without: their drafts are judged by rejection
    params: RequestParams
