"""The compress rings of all layers: one tensor per kind, empty wherever nobody has written."""

import torch
from torch import Tensor

from dspark.state.geometry import KINDS, StateGeometry

EMPTY_KV = 0.0
EMPTY_SCORE = -torch.inf


class StatePools:
    """fp32 rows `[layers, rows, width]` per kind; the first half of a row is kv, then the score.

    An empty row is kv 0 and score -inf: the score gives it no weight, and the 0 keeps a weight of
    zero from meeting a stale NaN.
    """

    def __init__(self, geometry: StateGeometry, device: torch.device | str):
        self.geometry = geometry
        self.tensors = {
            kind: torch.empty(
                geometry.ring(kind).layers,
                geometry.rows(kind),
                geometry.ring(kind).width,
                dtype=torch.float32,  # whatever the default is while SGLang loads a model
                device=device,
            )
            for kind in KINDS
        }
        self.reset()

    def layer(self, kind: str, i: int) -> Tensor:
        """Contiguous view [rows, width] of layer `i` among the layers that have this kind."""
        return self.tensors[kind][i]

    def page_view(self, kind: str, i: int) -> Tensor:
        """u8 [pages + 1, bytes]: layer `i` of "c4" or "idx" as one block per page, for copies."""
        if kind == "c128":
            raise KeyError("the c128 ring belongs to slots, not to pages")
        layer = self.layer(kind, i)
        return layer.view(self.geometry.window_pages + 1, -1).view(torch.uint8)

    def reset(self) -> None:
        """Empty every row, those of the padding owners included."""
        for rows in self.tensors.values():
            half = rows.shape[-1] // 2
            rows[..., :half] = EMPTY_KV
            rows[..., half:] = EMPTY_SCORE
