"""What the target makes of the candidates: how many drafts stay, and the tokens that are emitted.

R requests, V = depth + 1 rows of each, N tokens in the vocabulary.
"""

import torch

from dspark.kernels.accept import Accept, accept_greedy, accept_sampled
from dspark.kernels.collective import Group
from dspark.speculation import ranks
from dspark.speculation.budget import VerifyRows
from dspark.speculation.requests import Requests
from dspark.speculation.sampling import cut_tails


def accept(
    candidates: torch.Tensor,
    logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    requests: Requests,
    rows: VerifyRows,
    group: Group,
) -> Accept:
    """The same outcome on every rank.

    Args:
        candidates: i64 [R, V].
        logits: f32 [R * V, N] adjusted to what the requests asked for; tails are cut here.
        draft_logits: f32 [R, V - 1, N] distribution the drafts were drawn from, or None.
    """
    params = requests.params
    if params.all_greedy:
        outcome = accept_greedy(
            candidates,
            logits,
            verify_len=rows.acceptable,
            prefix_len=requests.committed,
            rows_run=rows.run,
        )
    else:
        kept = cut_tails(logits.view(*candidates.shape, -1), params)
        outcome = accept_sampled(
            candidates,
            kept.view(logits.shape),
            draft_logits,
            verify_len=rows.acceptable,
            prefix_len=requests.committed,
            temperature=params.temperature,
            greedy=params.greedy,
            seed=requests.seed,
            rows_run=rows.run,
        )
    return ranks.agree_on_accept(outcome, requests.committed, group)


def emitted(outcome: Accept, logits: torch.Tensor, broken: int) -> torch.Tensor:
    """i64 [R, V] tokens for the host; `broken` in place of one that could not be chosen.

    logits: f32 [R * V, N] as judged by `accept`.
    """
    requests, width = outcome.tokens.shape
    last = outcome.accepted.long()
    row = torch.arange(requests, device=logits.device) * width + last
    at_last = torch.arange(width, device=logits.device) == last[:, None]
    return torch.where(at_last & ~has_choice(logits[row])[:, None], broken, outcome.tokens)


def has_choice(logits: torch.Tensor) -> torch.Tensor:
    """f32 [R, N] -> bool [R]: some token has a finite or +inf logit."""
    return (logits > -torch.inf).any(-1)
