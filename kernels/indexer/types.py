"""Results of the indexer ops."""

from typing import NamedTuple

from torch import Tensor


class IndexQuery(NamedTuple):
    q: Tensor  # [T, Hi, 128] e4m3 (served) or f32 (oracle)
    weight: Tensor  # f32 [T, Hi] head weight with both softmax scales and the query scale folded in


class TopK(NamedTuple):
    slot: Tensor  # i32 [T, k] C4-pool slots in ascending entry order, -1 tail
    length: Tensor  # i32 [T] min(visible entries, k)
    logical: Tensor  # i32 [T, k] entry indices, ascending, -1 tail
