"""Torch reference of K10 and K11; also the CPU production path.

Every reduction runs in f64 and is rounded once, so a row's bits never depend on the other rows.
"""

import torch
from torch import Tensor

from dspark.kernels.qkv.pages import NOPE, ROPE, store_slots


def rotation(cos_sin: Tensor, pos: Tensor) -> Tensor:
    """c128 [T, 32] factors cos + i sin of each row's position."""
    row = cos_sin[pos.long()].double()
    return torch.complex(row[:, : ROPE // 2], row[:, ROPE // 2 :])


def rotate(x: Tensor, factors: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i+1) of x f64 [..., 64] by c128 factors broadcastable to [..., 32]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * factors).flatten(-2)


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """f64 [..., 1] reciprocal root mean square of x f64 [..., N]."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def q_norm_rope(q: Tensor, cos_sin: Tensor, pos: Tensor, eps: float) -> Tensor:
    x = q.double()
    # Served arithmetic rounds the normed query before it is rotated (a no-op for f32 oracles).
    normed = (x * rms_scale(x, eps)).to(q.dtype)
    rope = normed[..., NOPE:].double()
    normed[..., NOPE:] = rotate(rope, rotation(cos_sin, pos)[:, None]).to(q.dtype)
    return normed


def inv_rope(o: Tensor, cos_sin: Tensor, pos: Tensor) -> Tensor:
    rope = o[..., NOPE:].double()
    back = rotate(rope, rotation(cos_sin, pos).conj()[:, None]).to(o.dtype)
    return torch.cat([o[..., :NOPE], back], -1)


def kv_norm_rope_store(
    kv: Tensor,
    norm_w: Tensor,
    cos_sin: Tensor,
    pos: Tensor,
    loc: Tensor,
    pool: Tensor,
    slots_per_page: int,
    eps: float,
) -> None:
    x = kv.double()
    x = x * rms_scale(x, eps) * norm_w.double()
    x[:, NOPE:] = rotate(x[:, NOPE:], rotation(cos_sin, pos))
    store_slots(pool, slots_per_page, loc, x.float())
