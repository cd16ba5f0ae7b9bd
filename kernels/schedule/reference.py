"""Torch reference of the schedule: one stable sort, most likely to survive first."""

import torch
from torch import Tensor


def survival(confidence: Tensor) -> Tensor:
    """f32 [R, gamma] running product, multiplied in order; NaN counts as 0, values clamp to 1."""
    clean = confidence.nan_to_num(nan=0.0).clamp(0.0, 1.0)
    product = [clean[:, 0]] if clean.shape[1] else []
    for i in range(1, clean.shape[1]):
        product.append(product[-1] * clean[:, i])
    return torch.stack(product, 1) if product else clean


def schedule(
    confidence: Tensor,
    budget: Tensor,
    *,
    eps: float = 1e-6,
    min_len: int = 1,
    max_len: int | None = None,
    num_real: Tensor | None = None,
) -> Tensor:
    """Verify length of each request: i32 [R], `min_len` rows plus the drafts that win budget.

    Draft i of request r survives with probability a = c[r, 0] * ... * c[r, i]. The `budget`
    drafts of the whole batch with the largest a are selected; equal a: smaller i first, then
    smaller r. Drafts with a < eps, and drafts no verify of `max_len` rows could hold, are never
    selected. a never grows along a request, so the selection is a prefix of each block.

    Args:
        confidence: f32 [R, gamma] in [0, 1]; NaN counts as 0 (no budget for a broken row).
        budget: i32 [1] on the device, draft rows to admit; <= 0 admits none.
        min_len: rows every request verifies, >= 1 (the first row needs no draft).
        max_len: most rows of one request, at most gamma + 1 (the default).
        num_real: i32 [1] on the device; requests from there on are padding and get 0.

    Raises:
        ValueError: when the shapes or bounds break these rules.
    """
    requests, gamma = confidence.shape
    max_len = gamma + 1 if max_len is None else max_len
    device = confidence.device
    request = torch.arange(requests, device=device)
    real = request < (requests if num_real is None else num_real)

    value = survival(confidence)[:, : max_len - min_len]
    alive = (value >= eps) & real[:, None]
    # Flattened position-major, so that a stable sort breaks ties by position, then request.
    keys = torch.where(alive, value, -1.0).T.flatten()
    order = torch.sort(keys, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
    selected = alive & (budget > rank.view(value.T.shape).T)

    return torch.where(real, min_len + selected.sum(1), 0).to(torch.int32)
