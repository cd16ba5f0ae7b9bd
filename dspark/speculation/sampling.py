"""The requests of a step, and how the token of a row is chosen for them.

Order as in SGLang's decode: penalties, grammar mask, bias, custom processors, then temperature
with top-k, top-p and min-p cut from the same sorted probabilities.
"""

import hashlib
from typing import NamedTuple

import torch

from dspark.kernels.sampling import Cut, choose, cut_tails

BROKEN = -1  # emitted in place of a token that could not be chosen


class RequestParams(NamedTuple):
    """Sampling parameters of R requests."""

    temperature: torch.Tensor  # f32 [R]; 0 = greedy
    top_k: torch.Tensor  # i32 [R]
    top_p: torch.Tensor  # f32 [R]
    min_p: torch.Tensor  # f32 [R]
    # Known to the host, to pick the code path:
    all_greedy: bool
    any_cut: bool  # some request uses top-k, top-p or min-p


class Requests(NamedTuple):
    """R running requests, on the device but for what the host must know to pick a code path."""

    slot: torch.Tensor  # i64 [R] request slots
    committed: torch.Tensor  # i64 [R] committed length; the bonus token sits at this position
    bonus: torch.Tensor  # i64 [R] last emitted token, which no forward has seen yet
    seed: torch.Tensor  # i64 [R]
    seeded: torch.Tensor  # bool [R] the request itself named the seed
    unseeded: int  # requests that sample without: their drafts are judged by rejection
    params: RequestParams


def tails(logits: torch.Tensor, params: RequestParams) -> Cut | None:
    """What top-k, top-p and min-p leave of each row; None where nobody asked for them.

    logits: f32 [R * V, N].
    """
    if params.all_greedy or not params.any_cut:
        return None
    return cut_tails(logits, params.temperature, params.top_k, params.top_p, params.min_p)


def draw(
    logits: torch.Tensor, params: RequestParams, seed: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """i64 [R * V] packed choice of each row (`kernels.sampling.choose`).

    Args:
        logits: f32 [R * V, N]. seed: i64 [R].
        position: i64 [R] where the token stands that row 0 of each request decides.
    """
    return choose(logits, params.temperature, seed, position, tails(logits, params))


def request_seed(server_seed: int, rid: str, seed: int | None) -> int:
    """i64 seed of a request: its own, else derived from the server's seed and the request id.

    Every rank knows both, and neither depends on the batch or the slot a request is in.
    """
    if seed is not None:
        return seed
    return _digest(f"{server_seed}/{rid}")


def choice_seed(seed: int, choice: int) -> int:
    """i64 seed of one of the `n` texts of a seeded request; the first has the request's own."""
    return seed if choice == 0 else _digest(f"{seed}#{choice}")


def _digest(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
