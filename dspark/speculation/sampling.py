"""The distribution each row is judged by: from raw logits to what the request asked for.

Order as in SGLang's decode: penalties, grammar mask, bias, custom processors, then temperature
with top-k, top-p and min-p cut from the same sorted probabilities.
"""

import hashlib
from typing import NamedTuple

import torch

from dspark.kernels.accept.reference import race, softmax
from dspark.kernels.common import rng


class RequestParams(NamedTuple):
    """Sampling parameters of R requests."""

    temperature: torch.Tensor  # f32 [R]
    greedy: torch.Tensor  # bool [R]
    top_k: torch.Tensor  # i32 [R]
    top_p: torch.Tensor  # f32 [R]
    min_p: torch.Tensor  # f32 [R]
    all_greedy: bool  # known to the host: picks the code path
    any_cut: bool  # some request uses top-k, top-p or min-p


def cut_tails(logits: torch.Tensor, params: RequestParams) -> torch.Tensor:
    """Tokens outside top-k, top-p or min-p set to -inf; greedy requests pass unchanged.

    With probabilities sorted in descending order (ties: smaller id first), position i stays if
    i < top_k, the mass before it is <= top_p, and its probability is >= min_p times the largest.

    Args:
        logits: f32 [R, V, N]. Returns the same shape; the first position always stays.
    """
    if params.all_greedy or not params.any_cut:
        return logits
    probability = softmax(logits, params.temperature[:, None, None])
    order = torch.sort(probability, dim=-1, descending=True, stable=True)
    before = order.values.cumsum(-1) - order.values
    place = torch.arange(logits.shape[-1], device=logits.device)
    keep = (place < params.top_k[:, None, None]) & (before <= params.top_p[:, None, None])
    keep &= order.values >= order.values[..., :1] * params.min_p[:, None, None]
    keep |= (place == 0) | params.greedy[:, None, None]
    kept = torch.zeros_like(keep).scatter_(-1, order.indices, keep)
    return logits.masked_fill(~kept, -torch.inf)


def draw(
    logits: torch.Tensor, params: RequestParams, seed: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """One token per request, without drafts: what the prompt's last row is sampled by.

    Args:
        logits: f32 [R, N] after `cut_tails`. seed: i64 [R]. position: i64 [R] of the new token.

    Returns:
        i64 [R]; token 0 for a row without a finite logit.
    """
    clean = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = clean.argmax(-1)
    if params.all_greedy:
        return best
    stream = rng.stream(seed, position, rng.RESAMPLE)
    return torch.where(
        params.greedy, best, race(softmax(logits, params.temperature[:, None]), stream)
    )


def request_seed(server_seed: int, rid: str, seed: int | None) -> int:
    """i64 seed of a request: its own, else derived from the server's seed and the request id.

    Every rank knows both, and neither depends on the batch or the slot a request is in.
    """
    if seed is not None:
        return seed
    digest = hashlib.blake2b(f"{server_seed}/{rid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
