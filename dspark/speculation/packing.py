"""Verify rows packed: those that run, request after request, without the rest of the width.

Where the host knows how many rows run (on a CPU), the target is given these rows and no others. A
captured graph has a fixed shape, so on a GPU the rest of the width runs as padding instead; so it
does with tensor parallelism, where a faulty rank that counts otherwise must not break the sums.
Rows do not depend on their neighbours, so a row has the same bits in both layouts.

R requests, V rows of verify width, T packed rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.speculation.sampling import Requests


class Packing(NamedTuple):
    """Where the packed rows stand among all R * V, and the reverse."""

    place: Tensor  # i64 [T] r * V + j of each packed row
    at: Tensor  # i64 [R, V] packed row of row j; the request's last one where j does not run

    def pack(self, rows: Tensor) -> Tensor:
        """[R * V, ...] -> [T, ...]."""
        return rows[self.place]

    def spread(self, packed: Tensor, fill: float) -> Tensor:
        """[T, ...] -> [R * V, ...]; rows that do not run hold `fill`."""
        rows = packed.new_full((self.at.numel(), *packed.shape[1:]), fill)
        rows[self.place] = packed
        return rows

    def one_by_one(self, requests: Requests) -> Requests:
        """T requests of one row each: what chooses the token after each packed row."""
        width = self.at.shape[1]
        owner, row = self.place // width, self.place % width
        params = requests.params
        return requests._replace(
            slot=requests.slot[owner],
            committed=requests.committed[owner] + row,
            bonus=requests.bonus[owner],
            seed=requests.seed[owner],
            seeded=requests.seeded[owner],
            params=params._replace(
                temperature=params.temperature[owner],
                top_k=params.top_k[owner],
                top_p=params.top_p[owner],
                min_p=params.min_p[owner],
            ),
        )


def packing_of(run: Tensor, width: int) -> Packing | None:
    """The layout of a step; None where every row runs. Waits for the device.

    run: int [R] rows that run of each request, 1..width.
    """
    if int(run.sum()) == run.shape[0] * width:
        return None
    row = torch.arange(width, device=run.device)
    place = (row < run[:, None]).flatten().nonzero()[:, 0]
    first = run.long().cumsum(0) - run
    return Packing(place, first[:, None] + torch.minimum(row, run[:, None] - 1))
