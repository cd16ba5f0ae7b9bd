"""K12-K14: compressors that turn closed windows of tokens into one cache entry each.

A raw row is (kv, score) of one token, before the position bias `ape`. Rows of this forward come
in as `s`; older rows of a still open window wait in a ring (`state`). The entry of a window is
sum_j kv_j * softmax_j(score_j + ape_j) per channel, RMS-normed, rotated at the position of the
window's first token and stored. Windows (model section "compressor"):

* C4 overlaps: 8 rows, the A halves of the previous 4 tokens and the B halves of its own 4;
* C128 does not: its own 128 rows.
"""

import torch
from torch import Tensor

from dspark.kernels.common.dispatch import use_triton
from dspark.kernels.compress.stream import C4Stream

__all__ = ["C4Stream", "c4_compress", "c4_compress_pair", "c128_compress", "few_rows"]

KINDS = ("kv", "index")


def few_rows(rows_per_request: int, ring: int) -> bool:
    """True when no raw row of a forward lands where a C4 entry of the same forward still reads.

    An entry reads back to position p - 7; the row that takes its ring row is at p - 7 + ring.
    """
    return rows_per_request <= ring - 7


def c4_compress(
    s: Tensor,
    ape: Tensor,
    state: Tensor,
    plan: Tensor,
    store: Tensor,
    norm_w: Tensor,
    cos_sin: Tensor,
    out_loc: Tensor,
    pool: Tensor,
    entries_per_page: int = 64,
    kind: str = "kv",
    eps: float = 1e-6,
) -> None:
    """Form the C4 entries that close in this forward, then store the raw rows.

    Args:
        s: f32 [T, 4 * Dh], [kv A | kv B | score A | score B] of each row. Rows of one request are
            consecutive and in position order.
        ape: f32 [8, Dh], rows 0-3 bias the A half, 4-7 the B half.
        state: f32 [rows, 4 * Dh] ring, changed in place.
        plan: i32 [T, 4]: position, ring row of position - 7, ring row of position - 3 (-1 before
            the sequence starts; the four rows of a group are consecutive), row index in request.
        store: i32 [T] ring row that receives the raw row, -1 = not stored.
        norm_w: [Dh]. cos_sin: f32 [max_positions, 64].
        out_loc: i32 [T] slot of the entry that closes at this row, -1 = none.
        pool: KV pool (kind "kv", Dh 512) or index pool (kind "index", Dh 128, Hadamard-rotated),
            changed in place.

    Raises:
        ValueError: for another kind or shapes that disagree.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
    _check(s, ape, state, plan, store, norm_w, out_loc, terms=8, halves=2)
    if use_triton(s):
        from dspark.kernels.compress import kernel as implementation
    else:
        from dspark.kernels.compress import reference as implementation
    implementation.c4_compress(
        s, ape, state, plan, store, norm_w, cos_sin, out_loc, pool, entries_per_page, kind, eps
    )


def c4_compress_pair(
    main: C4Stream,
    index: C4Stream,
    plan: Tensor,
    store: Tensor,
    cos_sin: Tensor,
    out_loc: Tensor,
    entries_per_page: int = 64,
    eps: float = 1e-6,
    *,
    few_rows: bool,
) -> None:
    """Both compressors of a C4 layer: `c4_compress` of `main` (kv), then of `index`.

    few_rows: what the function `few_rows` says of the longest request (decode, verify). One launch
    then does everything; otherwise three do, with the same bits. Other arguments and errors as
    `c4_compress`.
    """
    if use_triton(main.s):
        from dspark.kernels.compress import kernel

        for part in (main, index):
            _check(
                part.s, part.ape, part.state, plan, store, part.norm_w, out_loc, terms=8, halves=2
            )
        kernel.c4_compress_pair(
            main, index, plan, store, cos_sin, out_loc, entries_per_page, eps, few_rows
        )
        return
    for part, kind in ((main, "kv"), (index, "index")):
        c4_compress(
            part.s, part.ape, part.state, plan, store, part.norm_w, cos_sin, out_loc, part.pool,
            entries_per_page, kind, eps,
        )  # fmt: skip


def c128_compress(
    s: Tensor,
    ape: Tensor,
    state: Tensor,
    plan: Tensor,
    store: Tensor,
    norm_w: Tensor,
    cos_sin: Tensor,
    out_loc: Tensor,
    pool: Tensor,
    entries_per_page: int = 2,
    eps: float = 1e-6,
) -> None:
    """Form the C128 entries that close in this forward, then store the raw rows.

    As `c4_compress`, with s f32 [T, 1024] = [kv | score], ape f32 [128, 512], state
    [rows, 1024] and plan i32 [T, 4]: position, first ring row of the request, ring length, row
    index in request (position p lives in ring row first + p % ring).

    Raises:
        ValueError: for shapes that disagree.
    """
    _check(s, ape, state, plan, store, norm_w, out_loc, terms=128, halves=1)
    if use_triton(s):
        from dspark.kernels.compress import kernel as implementation
    else:
        from dspark.kernels.compress import reference as implementation
    implementation.c128_compress(
        s, ape, state, plan, store, norm_w, cos_sin, out_loc, pool, entries_per_page, eps
    )


def _check(
    s: Tensor,
    ape: Tensor,
    state: Tensor,
    plan: Tensor,
    store: Tensor,
    norm_w: Tensor,
    out_loc: Tensor,
    *,
    terms: int,
    halves: int,
) -> None:
    rows, width = s.shape[0], norm_w.shape[0]
    columns = 2 * halves * width
    if s.shape != (rows, columns) or state.shape[1] != columns or ape.shape != (terms, width):
        raise ValueError(
            f"a {width}-wide compressor needs s and state [*, {columns}] and ape "
            f"[{terms}, {width}], got {list(s.shape)}, {list(state.shape)} and {list(ape.shape)}"
        )
    if plan.shape != (rows, 4) or store.shape != (rows,) or out_loc.shape != (rows,):
        raise ValueError(
            f"plan, store and out_loc must cover {rows} rows, got {list(plan.shape)}, "
            f"{list(store.shape)} and {list(out_loc.shape)}"
        )
    if s.dtype != torch.float32 or state.dtype != torch.float32:
        raise ValueError(f"raw rows and ring must be f32, got {s.dtype} and {state.dtype}")
