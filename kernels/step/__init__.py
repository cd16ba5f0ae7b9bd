"""K23: the addresses one forward needs, computed once and shared by all layers.

Every tensor has a static shape; counts live on the device. Padded rows carry position 0,
`row_req` -1, every location and index -1 and every length 0, so that writers skip them and
readers see empty lists.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.kernels.common.dispatch import use_triton


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


def step_meta(
    *,
    req_slot: Tensor,
    prefix_len: Tensor,
    row_len: Tensor,
    rows: int,
    req_to_token: Tensor,
    full_to_swa: Tensor,
    window: int,
    ring_c4: int,
    ring_c128: int,
    max_pages: int,
    max_c128: int,
    page: int = 256,
    store_all: bool,
    stride: int | None = None,
    out: StepMeta | None = None,
) -> StepMeta:
    """Addresses of a target forward: prefill, decode or verify.

    Row r of request i has position `prefix_len[i] + r`. Rows are packed request after request,
    and rows past `sum(row_len)` are padded; or, with `stride`, row r of request i is row
    `i * stride + r` and the rest of its stride is padded (a verify launches a fixed shape while
    lengths live on the device). Rows of a request with `req_slot` -1 are padded.

    Args:
        req_slot: i64 [R], row of `req_to_token`; -1 = padded request.
        prefix_len: i64 [R], tokens before this forward. row_len: i64 [R], rows in it.
        rows: T, static.
        req_to_token: i32 [S, M] full-pool location of each position, this forward included.
        full_to_swa: i64 [F] window-pool slot of each full-pool location.
        ring_c4, ring_c128: rows of the compressor rings, per page and per request slot.
        store_all: keep every raw row (decode, verify: any of them may turn out to be the last
            committed one). Otherwise keep what a later forward can read: the open block, for C4
            also the block before it and the last four positions of every page.
        stride: rows launched per request, `row_len` <= stride and T = R * stride; None = packed.
        out: written in place when given.

    No two rows of one call share a ring row: the highest position wins.

    Raises:
        ValueError: on a shape or ring that breaks these rules.
    """
    _check_step(req_slot, prefix_len, row_len, rows, stride, page, ring_c4, ring_c128)
    if use_triton(req_slot):
        from dspark.kernels.step.kernel import step_meta as implementation
    else:
        from dspark.kernels.step.reference import step_meta as implementation
    return implementation(
        req_slot=req_slot,
        prefix_len=prefix_len,
        row_len=row_len,
        rows=rows,
        req_to_token=req_to_token,
        full_to_swa=full_to_swa,
        window=window,
        ring_c4=ring_c4,
        ring_c128=ring_c128,
        max_pages=max_pages,
        max_c128=max_c128,
        page=page,
        store_all=store_all,
        stride=stride,
        out=out,
    )


def draft_meta(
    *,
    req_slot: Tensor,
    prefix_len: Tensor,
    gamma: int,
    req_to_token: Tensor,
    full_to_swa: Tensor,
    window: int,
    valid_from: Tensor,
    out: DraftMeta | None = None,
) -> DraftMeta:
    """Addresses of a draft block at positions L..L+gamma-1, L = `prefix_len`.

    Each row attends to the draft KV of positions max(valid_from, L - window)..L-1 and to all
    gamma block rows (the block is not causal). Compacted, ascending.

    Args:
        req_slot: i64 [R], -1 = padded request. prefix_len: i64 [R], committed tokens.
        valid_from: i64 [R], first position whose draft KV was injected.
        req_to_token: i32 [S, M], including the gamma block positions. full_to_swa: i64 [F].
        out: written in place when given.

    Raises:
        ValueError: when gamma or window is not positive, or the lengths disagree.
    """
    if gamma < 1 or window < 1:
        raise ValueError(f"draft_meta needs gamma and window >= 1, got {gamma} and {window}")
    _check_same_length(req_slot=req_slot, prefix_len=prefix_len, valid_from=valid_from)
    if use_triton(req_slot):
        from dspark.kernels.step.kernel import draft_meta as implementation
    else:
        from dspark.kernels.step.reference import draft_meta as implementation
    return implementation(
        req_slot=req_slot,
        prefix_len=prefix_len,
        gamma=gamma,
        req_to_token=req_to_token,
        full_to_swa=full_to_swa,
        window=window,
        valid_from=valid_from,
        out=out,
    )


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


def _check_step(
    req_slot: Tensor,
    prefix_len: Tensor,
    row_len: Tensor,
    rows: int,
    stride: int | None,
    page: int,
    ring_c4: int,
    ring_c128: int,
) -> None:
    _check_same_length(req_slot=req_slot, prefix_len=prefix_len, row_len=row_len)
    if stride is not None and rows != req_slot.shape[0] * stride:
        raise ValueError(f"{req_slot.shape[0]} requests of {stride} rows are not {rows} rows")
    if page % 128:
        raise ValueError(f"page must be a multiple of 128 tokens, got {page}")
    if ring_c4 < 8 or ring_c4 % 4 or page % ring_c4:
        raise ValueError(
            f"ring_c4 must be >= 8, a multiple of 4 and divide the page {page}, got {ring_c4}"
        )
    if ring_c128 < 128:
        raise ValueError(f"ring_c128 must be >= 128, got {ring_c128}")


def _check_same_length(**per_request: Tensor) -> None:
    lengths = {name: list(value.shape) for name, value in per_request.items()}
    if (
        any(len(shape) != 1 for shape in lengths.values())
        or len({*map(tuple, lengths.values())}) > 1
    ):
        raise ValueError(f"one value per request expected, got shapes {lengths}")
