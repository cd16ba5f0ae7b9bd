"""What the step ops read, and their results."""

from typing import NamedTuple

import torch
from torch import Tensor


class BatchRows(NamedTuple):
    """Which positions a target forward runs. R requests; row r of request i is committed[i] + r.

    Rows are packed request after request, and rows past the sum of `run` are padded; or, with a
    `width`, row r of request i is row i * width + r and the rest of its width is padded (a verify
    launches a fixed shape while lengths live on the device).
    """

    request_slot: Tensor  # i64 [R] row of the token table; -1 = padded request
    committed: Tensor  # i64 [R] position of the first row: tokens whose state is stored already
    run: Tensor  # i64 [R] rows that count, at most the width; 0 for a padded request
    total: int  # rows launched, padded ones included: T
    width: int | None = None  # rows launched for each request, T = R * width; None = packed


class BlockRows(NamedTuple):
    """A draft block at positions L..L+gamma-1 of each of R requests, L = `committed`."""

    request_slot: Tensor  # i64 [R], -1 = padded request
    committed: Tensor  # i64 [R] committed tokens
    valid_from: Tensor  # i64 [R] first position whose draft latent was injected
    gamma: int


class Tables(NamedTuple):
    """Where tokens stand, this forward's included."""

    token_slot: Tensor  # i32 [S, M] of each request slot and position
    window_slot: Tensor  # i64 [F] of each token slot


class Bounds(NamedTuple):
    """Static widths of the lists in a StepMeta."""

    window: int  # tokens that a row attends to, itself included
    max_pages: int  # of any request
    max_c128: int  # C128 entries of any request
    page: int = 256  # tokens of a page


class Rings(NamedTuple):
    """Rows of the compressor rings."""

    c4: int  # per window page
    c128: int  # per request slot


class StepMeta(NamedTuple):
    """Addresses of one target forward of T rows; i32 unless noted.

    W is the window, B the most C128 entries of any request, R the number of requests.
    """

    pos: Tensor  # i64 [T] position of the row
    row_req: Tensor  # [T] request of the row, 0..R-1; -1 padded
    row_in_req: Tensor  # [T] index of the row inside its request; 0 padded
    window_slot: Tensor  # [T] window slot the row writes
    c4_entry: Tensor  # [T] slot of the C4 entry that closes at this row, else -1
    c128_entry: Tensor  # [T] the same for C128
    window_seen: Tensor  # [T, W] window slots the row attends to, ascending position, -1 tail
    window_len: Tensor  # [T] of `window_seen`
    c4_len: Tensor  # [T] visible C4 entries, (pos + 1) // 4
    c128_seen: Tensor  # [T, B] slots of the visible C128 entries, ascending, -1 tail
    c128_len: Tensor  # [T]
    page_table: Tensor  # [R, max_pages] full-pool pages; C4 entry j is page[j // 64] * 64 + j % 64
    c4_plan: Tensor  # [T, 4] pos, ring row of pos - 7, ring row of pos - 3 (-1 if none), row_in_req
    c4_store: Tensor  # [T] C4 ring row that receives this row, -1 = not stored
    c128_plan: Tensor  # [T, 4] pos, first ring row of the request (-1 padded), ring, row_in_req
    c128_store: Tensor  # [T] C128 ring row that receives this row, -1 = not stored


class DraftMeta(NamedTuple):
    """Addresses of one draft block: gamma rows a request, all attending to the same list."""

    pos: Tensor  # i64 [R * gamma]
    window_slot: Tensor  # i32 [R * gamma]
    seen: Tensor  # i32 [R * gamma, W + gamma] window slots, then the block's own slots, -1 tail
    length: Tensor  # i32 [R * gamma] of `seen`


def empty_step_meta(rows: int, requests: int, bounds: Bounds, *, device: torch.device) -> StepMeta:
    """Uninitialised StepMeta for `step_meta(out=...)`, e.g. one per captured graph size."""

    def i32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return StepMeta(
        pos=torch.empty(rows, dtype=torch.int64, device=device),
        row_req=i32(rows),
        row_in_req=i32(rows),
        window_slot=i32(rows),
        c4_entry=i32(rows),
        c128_entry=i32(rows),
        window_seen=i32(rows, bounds.window),
        window_len=i32(rows),
        c4_len=i32(rows),
        c128_seen=i32(rows, bounds.max_c128),
        c128_len=i32(rows),
        page_table=i32(requests, bounds.max_pages),
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
        window_slot=torch.empty(rows, dtype=torch.int32, device=device),
        seen=torch.empty(rows, window + gamma, dtype=torch.int32, device=device),
        length=torch.empty(rows, dtype=torch.int32, device=device),
    )
