"""Which drafts the target accepts, and the token it adds: the last stage of a verify step.

All ops take the verify rows in a fixed stride: row `r * V + j` holds the target's logits at
candidate j of request r, V = depth + 1. Candidate 0 is the last emitted token, candidates
1..depth are the drafts; row j is the target's distribution of the token after candidate j.
"""

from torch import Tensor

from dspark.kernels.accept import reference
from dspark.kernels.accept.types import Accept
from dspark.kernels.common.dispatch import op

__all__ = ["Accept", "accept_chosen", "accept_greedy", "accept_sampled"]


def _rows_fit(candidates: Tensor, logits: Tensor) -> None:
    if candidates.dim() != 2 or logits.dim() != 2 or logits.shape[0] != candidates.numel():
        raise ValueError(
            f"candidates [R, V] need logits [R * V, vocab], got {list(candidates.shape)} and "
            f"{list(logits.shape)}"
        )


def _choices_fit(candidates: Tensor, choice: Tensor) -> None:
    if candidates.dim() != 2 or choice.shape != (candidates.numel(),):
        raise ValueError(
            f"candidates [R, V] need choices [R * V], got {list(candidates.shape)} and "
            f"{list(choice.shape)}"
        )


def _rows_and_drafts_fit(candidates: Tensor, logits: Tensor, draft_logits: Tensor | None) -> None:
    _rows_fit(candidates, logits)
    if draft_logits is not None:
        expected = (candidates.shape[0], candidates.shape[1] - 1, logits.shape[1])
        if tuple(draft_logits.shape) != expected:
            raise ValueError(
                f"draft_logits must be {list(expected)}, got {list(draft_logits.shape)}"
            )


accept_greedy = op(reference.accept_greedy, check=_rows_fit)
accept_chosen = op(reference.accept_chosen, check=_choices_fit)
accept_sampled = op(reference.accept_sampled, check=_rows_and_drafts_fit)
