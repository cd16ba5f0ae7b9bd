"""Results of the step ops."""

from typing import NamedTuple

import torch
from torch import Tensor


class StepMeta(NamedTuple):
    """Addresses of one target forward of T rows; i32 unless noted.

    W is the window, B the most C128 entries of any request, R the number of requests.
    """

    pos: Tensor  # i64 [T] position of the row
    row_req: Tensor  # [T] request of the row, 0..R-1; -1 padded
    row_in_req: Tensor  # [T] index of the row inside its request; 0 padded
    swa_loc: Tensor  # [T] window-pool slot the row writes
    c4_loc: Tensor  # [T] C4-pool slot of the entry that closes at this row, else -1
    c128_loc: Tensor  # [T] the same for C128
    swa_idx: Tensor  # [T, W] window-pool slots the row attends to, ascending position, -1 tail
    swa_len: Tensor  # [T]
    c4_len: Tensor  # [T] visible C4 entries, (pos + 1) // 4
    c128_idx: Tensor  # [T, B] C128-pool slots, ascending, -1 tail
    c128_len: Tensor  # [T]
    page_table: Tensor  # [R, max_pages] full-pool pages; C4 entry j is page[j // 64] * 64 + j % 64
    c4_plan: Tensor  # [T, 4] pos, ring row of pos - 7, ring row of pos - 3 (-1 if none), row_in_req
    c4_store: Tensor  # [T] C4 ring row that receives this row, -1 = not stored
    c128_plan: Tensor  # [T, 4] pos, first ring row of the request (-1 padded), ring, row_in_req
    c128_store: Tensor  # [T] C128 ring row that receives this row, -1 = not stored


class DraftMeta(NamedTuple):
    """Addresses of one draft block: gamma rows a request, all attending to the same list."""

    pos: Tensor  # i64 [R * gamma]
    swa_loc: Tensor  # i32 [R * gamma]
    idx: Tensor  # i32 [R * gamma, W + gamma] window slots, then the block's own slots, -1 tail
    len: Tensor  # i32 [R * gamma]


def empty_step_meta(
    *, rows: int, requests: int, window: int, max_pages: int, max_c128: int, device: torch.device
) -> StepMeta:
    """Uninitialised StepMeta for `step_meta(out=...)`, e.g. one per captured graph size."""

    def i32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return StepMeta(
        pos=torch.empty(rows, dtype=torch.int64, device=device),
        row_req=i32(rows),
        row_in_req=i32(rows),
        swa_loc=i32(rows),
        c4_loc=i32(rows),
        c128_loc=i32(rows),
        swa_idx=i32(rows, window),
        swa_len=i32(rows),
        c4_len=i32(rows),
        c128_idx=i32(rows, max_c128),
        c128_len=i32(rows),
        page_table=i32(requests, max_pages),
        c4_plan=i32(rows, 4),
        c4_store=i32(rows),
        c128_plan=i32(rows, 4),
        c128_store=i32(rows),
    )


def empty_draft_meta(*, requests: int, gamma: int, window: int, device: torch.device) -> DraftMeta:
    """Uninitialised DraftMeta for `draft_meta(out=...)`."""
    rows = requests * gamma
    return DraftMeta(
        pos=torch.empty(rows, dtype=torch.int64, device=device),
        swa_loc=torch.empty(rows, dtype=torch.int32, device=device),
        idx=torch.empty(rows, window + gamma, dtype=torch.int32, device=device),
        len=torch.empty(rows, dtype=torch.int32, device=device),
    )
