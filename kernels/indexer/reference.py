"""Torch reference of the indexer; also the CPU production path."""

import torch
from torch import Tensor

from dspark.kernels.common.index_pages import KEYS, WIDTH, hadamard, load_index, quantise
from dspark.kernels.common.norm_rope import ROPE, rotate, rotation
from dspark.kernels.indexer.types import IndexQuery, TopK

WORKSPACE_BYTES = 8 << 20  # of any one temporary


def index_q(q: Tensor, w: Tensor, cos_sin: Tensor, pos: Tensor) -> IndexQuery:
    """Prepare index queries: RoPE on the last 64 dims, Hadamard, e4m3, scales folded into w.

    q: bf16 (served) or f32 (oracle) [T, Hi, 128]. w: [T, Hi] head weights, rounded to q's
    dtype. cos_sin: f32 [max_positions, 64]. pos: i64 [T]. Raises ValueError for shapes that
    disagree.
    """
    x = q.double()
    x[..., -ROPE:] = rotate(x[..., -ROPE:], rotation(cos_sin, pos)[:, None])
    x = hadamard(x).float()
    weight = w.to(q.dtype).double() * (WIDTH * q.shape[1]) ** -0.5
    if q.dtype == torch.float32:
        return IndexQuery(x, weight.float())
    codes, scale = quantise(x)
    return IndexQuery(codes, (weight * scale).float())


def index_logits(
    query: IndexQuery,
    pool: Tensor,
    page_table: Tensor,
    row_req: Tensor,
    c4_len: Tensor,
    c_max: int,
) -> Tensor:
    """f32 [T, c_max] index scores; -inf from the row's visible length on.

    pool: index pool (`dspark.kernels.common.index_pages`). page_table: i32 [R, max_pages], entry j
    of request r is key j % 64 of page page_table[r, j // 64]. row_req: i32 [T], -1 = padded.
    c4_len: i32 [T] visible entries, <= c_max. Raises ValueError for shapes that disagree.
    """
    rows, heads, _ = query.q.shape
    logits = torch.full((rows, c_max), -torch.inf, device=query.q.device)
    for request in row_req.unique().tolist():
        if request < 0:
            continue
        row = (row_req == request).nonzero().squeeze(1)
        longest = int(c4_len[row].max())
        # f64 bytes of a key, and of its dot products with one row's heads, whichever is more.
        per_key = 8 * max(heads, WIDTH)
        keys_at_once = max(KEYS, min(longest, WORKSPACE_BYTES // per_key) // KEYS * KEYS)
        for start in range(0, longest, keys_at_once):
            stop = min(start + keys_at_once, longest)
            pages = page_table[request, start // KEYS : -(-stop // KEYS)].long()
            keys, scale = load_index(pool, pages)
            keys = keys[: stop - start].T
            for part in row.split(max(1, WORKSPACE_BYTES // (per_key * max(stop - start, heads)))):
                q = query.q[part].double()
                dots = (q.view(-1, WIDTH) @ keys).relu_().view(-1, heads, stop - start)
                score = torch.bmm(query.weight[part].double()[:, None], dots).squeeze(1)
                if scale is not None:
                    score *= scale[: stop - start]
                visible = torch.arange(start, stop, device=row.device) < c4_len[part, None]
                logits[part, start:stop] = score.masked_fill_(~visible, -torch.inf).float()
    return logits


def index_topk(logits: Tensor, c4_len: Tensor, page_table: Tensor, row_req: Tensor, k: int) -> TopK:
    """The k largest scores of each row: exact, ties to the lower index, ascending, -1 tail.

    NaN counts as -inf, so that it is chosen last and disturbs no other row.

    logits: f32 [T, C] from `index_logits`. Rows with c4_len <= k take every visible entry.
    Raises ValueError when k < 1 or shapes disagree.
    """
    rows, width = logits.shape
    column = torch.arange(width, device=logits.device)
    chosen = column < c4_len[:, None]
    if width > k:
        logits = torch.where(logits.isnan(), -torch.inf, logits)
        # Everything above the k-th largest value, then the lowest-index entries equal to it.
        threshold = logits.topk(k).values[:, -1:]
        above = logits > threshold
        equal = (logits == threshold) & chosen
        room = k - above.sum(1, keepdim=True)
        chosen = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= room))
    row, entry = chosen.nonzero(as_tuple=True)  # row-major: ascending entry within a row
    length = c4_len.clamp(max=min(k, width)).to(torch.int32)
    rank = torch.arange(k, device=logits.device).expand(rows, k)[
        torch.arange(k, device=logits.device) < length[:, None]
    ]
    logical = torch.full((rows, k), -1, dtype=torch.int32, device=logits.device)
    slot = logical.clone()
    logical[row, rank] = entry.to(torch.int32)
    page = page_table[row_req[row].long(), entry // KEYS]
    slot[row, rank] = page * KEYS + (entry % KEYS).to(torch.int32)
    return TopK(slot, length, logical)


def index_select(
    query: IndexQuery,
    pool: Tensor,
    page_table: Tensor,
    row_req: Tensor,
    c4_len: Tensor,
    c_max: int,
    k: int,
) -> TopK:
    """`index_topk(index_logits(...))` with bounded temporaries, however long the prefill.

    Skips the scores where c_max <= k: every visible entry is chosen anyway. Same arguments, same
    result, same errors.
    """
    rows = c4_len.shape[0]
    longest = int(c4_len.max()) if rows else 0
    width = max(longest, 1)
    if longest <= k:  # every visible entry is chosen: no score is needed
        blank = torch.zeros(1, width, device=c4_len.device).expand(rows, width)
        return index_topk(blank, c4_len, page_table, row_req, k)
    parts = []
    step = max(1, WORKSPACE_BYTES // (4 * width))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        some = IndexQuery(query.q[part], query.weight[part])
        logits = index_logits(some, pool, page_table, row_req[part], c4_len[part], width)
        parts.append(index_topk(logits, c4_len[part], page_table, row_req[part], k))
    return TopK(*(torch.cat(field) for field in zip(*parts, strict=True)))
