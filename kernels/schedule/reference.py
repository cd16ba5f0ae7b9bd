"""Torch reference of K26: one stable sort of all candidates, most likely to survive first."""

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
    eps: float,
    min_len: int,
    max_len: int,
    num_real: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    requests = confidence.shape[0]
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

    length = torch.where(real, min_len + selected.sum(1), 0).to(torch.int32)
    return length if out is None else out.copy_(length)
