"""K26: how many draft rows of each request the target verifies, under a token budget."""

import torch
from torch import Tensor

from dspark.kernels.common.dispatch import use_triton


def schedule(
    confidence: Tensor,
    budget: Tensor,
    *,
    eps: float = 1e-6,
    min_len: int = 1,
    max_len: int | None = None,
    num_real: Tensor | None = None,
    out: Tensor | None = None,
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
        out: i32 [R], written in place when given.

    Raises:
        ValueError: when the shapes or bounds break these rules.
    """
    if confidence.dim() != 2 or confidence.dtype != torch.float32:
        raise ValueError(
            f"confidence must be f32 [requests, gamma], got {confidence.dtype} "
            f"{list(confidence.shape)}"
        )
    gamma = confidence.shape[1]
    max_len = gamma + 1 if max_len is None else max_len
    if not 1 <= min_len <= max_len <= gamma + 1:
        raise ValueError(
            f"need 1 <= min_len <= max_len <= gamma + 1 = {gamma + 1}, got {min_len} and {max_len}"
        )
    if use_triton(confidence):
        from dspark.kernels.schedule.kernel import schedule as implementation
    else:
        from dspark.kernels.schedule.reference import schedule as implementation
    return implementation(
        confidence,
        budget,
        eps=eps,
        min_len=min_len,
        max_len=max_len,
        num_real=num_real,
        out=out,
    )
