"""Torch reference of K18 and K19; also the CPU production path."""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.kernels.qkv.pages import HEAD, NOPE, load_slots
from dspark.kernels.qkv.reference import rotate, rotation

WORKSPACE_BYTES = 2 << 20  # of the gathered f64 keys of one row chunk; small enough to stay cached


def mla_sparse(
    q: Tensor,
    swa_pool: Tensor,
    swa_n: int,
    swa_idx: Tensor,
    swa_len: Tensor,
    x_pool: Tensor | None,
    x_n: int,
    x_idx: Tensor | None,
    x_len: Tensor | None,
    sink: Tensor,
    scale: float,
    cos_sin: Tensor | None,
    pos: Tensor,
) -> Tensor:
    out = torch.empty_like(q)
    width = swa_idx.shape[1] + (0 if x_idx is None else x_idx.shape[1])
    step = max(1, WORKSPACE_BYTES // (8 * HEAD * max(width, 1)))
    for start in range(0, q.shape[0], step):
        rows = slice(start, start + step)
        lists = [KeyList.load(swa_pool, swa_n, swa_idx[rows], swa_len[rows])]
        if x_pool is not None and x_idx is not None and x_len is not None:
            lists.append(KeyList.load(x_pool, x_n, x_idx[rows], x_len[rows]))
        o = _attend(q[rows].double(), lists, sink.double(), scale)
        if cos_sin is not None:
            back = rotation(cos_sin, pos[rows]).conj()[:, None]
            o[..., NOPE:] = rotate(o[..., NOPE:], back)
        out[rows] = o.to(q.dtype)
    return out


class KeyList(NamedTuple):
    keys: Tensor  # f64 [T, N, 512]; zeros where hidden
    hidden: Tensor  # bool [T, 1, N]

    @classmethod
    def load(cls, pool: Tensor, slots_per_page: int, idx: Tensor, length: Tensor) -> "KeyList":
        column = torch.arange(idx.shape[1], device=idx.device)
        loc = idx.masked_fill(column >= length[:, None], -1)
        return cls(load_slots(pool, slots_per_page, loc), (loc < 0)[:, None])


def _attend(q: Tensor, lists: list[KeyList], sink: Tensor, scale: float) -> Tensor:
    """f64 [T, H, 512]: softmax over all lists, the sink [H] counting in the denominator only."""
    widths = [part.keys.shape[1] for part in lists]
    scores = torch.cat([torch.bmm(q, part.keys.transpose(1, 2)) for part in lists], -1).mul_(scale)
    scores.masked_fill_(torch.cat([part.hidden for part in lists], -1), -torch.inf)
    sink = sink[:, None].expand(q.shape[0], -1, 1)
    top = torch.cat([scores, sink], -1).amax(-1, keepdim=True)
    weight = (scores - top).exp_()
    total = weight.sum(-1, keepdim=True) + (sink - top).exp()
    parts = zip(weight.split(widths, -1), lists, strict=True)
    return sum(torch.bmm(part, kept.keys) for part, kept in parts) / total
