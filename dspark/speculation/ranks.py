"""Tensor-parallel ranks decide alike, and prove it to each other in every step.

What a step decides (drafts, budgets, accepted runs) follows from values that are equal on all
ranks by construction, so nobody has to be told. A rank whose card or memory is faulty would go on
with a text of its own, and from then on the ranks would add up parts of two texts. So the ranks
exchange one word a request and step and compare it. The outcome travels to the host with the
tokens, as a number below BROKEN, and ends the server there: `raise_fault`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.kernels.accept import Accept
from dspark.kernels.collective import Group, transport
from dspark.speculation.budget import VerifyRows
from dspark.speculation.packing import Packing
from dspark.speculation.sampling import BROKEN

_FACTOR = 0x2545F4914F6CDD1D
_SHIFT = 29


class RankFault(RuntimeError):
    """A rank does not compute what the others do; the message is one sentence that names it."""


class Agreement(NamedTuple):
    """What the ranks together say about each request of a step."""

    has_choice: Tensor  # bool [R] some rank has a token to choose
    fault: Tensor | None  # i64 [R] 2 * rank + (1 for logits broken there alone), -1 none


def broken_rows(logits: Tensor, group: Group) -> Tensor:
    """[T, N] this rank's columns as the model gave them -> bool [T]: whether they hold a NaN.

    One rank alone has nobody to differ from and does not look.
    """
    if group is None:
        return torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    return logits.isnan().any(-1)


def has_choice(logits: Tensor) -> Tensor:
    """f32 [R, N] -> bool [R]: some token has a finite or +inf logit."""
    return (logits > -torch.inf).any(-1)


def compare_steps(
    candidates: Tensor,
    rows: VerifyRows,
    outcome: Accept,
    logits: Tensor,
    broken: Tensor,
    group: Group,
    packing: Packing | None = None,
) -> Agreement:
    """`compare` all that a decode step has decided. V rows of each request.

    Args:
        candidates: i64 [R, V].
        logits: f32 [R * V, N or this rank's columns] that the drafts were judged by; with a
            `packing` [T, ...].
        broken: bool [R * V] of `broken_rows`; rows behind the accepted ones do not count.
    """
    requests, width = candidates.shape
    row = torch.arange(width, device=candidates.device)
    counts = [rows.run, rows.acceptable, outcome.accepted, outcome.trimmed]
    decisions = torch.cat([candidates, outcome.tokens, torch.stack(counts, 1).long()], 1)
    # The row that chose the last token of each request.
    if packing is None:
        index = torch.arange(requests * width, device=candidates.device).view(requests, width)
    else:
        index = packing.at
    last = index.gather(1, outcome.accepted.long()[:, None])[:, 0]
    counted = broken.view(requests, width) & (row <= outcome.accepted[:, None])
    return compare(decisions, has_choice(logits[last]), counted.any(1), group)


def compare(decisions: Tensor, has_choice: Tensor, shard_broken: Tensor, group: Group) -> Agreement:
    """Exchange one word a request.

    Args:
        decisions: i64 [R, K] everything this rank has decided about each request.
        has_choice: bool [R] whether the logits this rank has judged hold a usable number.
        shard_broken: bool [R] whether this rank's columns, as the model gave them, hold a NaN.
        group: the ranks; None compares nothing.
    """
    if group is None:
        return Agreement(has_choice, None)
    words = transport.gather(_word(decisions, has_choice, shard_broken), group, "decisions")
    odd, alone = _odd_rank(words >> 2), _alone(words & 1 == 1)
    fault = torch.where(odd >= 0, 2 * odd, torch.where(alone >= 0, 2 * alone + 1, -1))
    return Agreement((words & 2 == 2).any(0), fault)


def emitted(outcome: Accept, agreement: Agreement) -> Tensor:
    """i64 [R, V] tokens for the host; BROKEN in place of one that could not be chosen."""
    row = torch.arange(outcome.tokens.shape[1], device=outcome.tokens.device)
    no_choice = ~agreement.has_choice[:, None] & (row == outcome.accepted[:, None])
    return mark(torch.where(no_choice, BROKEN, outcome.tokens), agreement)


def mark(tokens: Tensor, agreement: Agreement) -> Tensor:
    """i64 [R, V] tokens for the host, the first of a row replaced where a rank is at fault."""
    if agreement.fault is None:
        return tokens
    fault = agreement.fault
    first = torch.where(fault >= 0, BROKEN - 1 - fault, tokens[:, 0])
    return torch.cat([first[:, None], tokens[:, 1:]], 1)


def raise_fault(token: int) -> None:
    """Raise RankFault for a number below BROKEN that `mark` put in place of a token."""
    rank, alone = divmod(BROKEN - 1 - token, 2)
    what = (
        "computed logits that are not numbers, and no other rank did"
        if alone
        else "decided on other tokens than the other ranks"
    )
    raise RankFault(
        f"Rank {rank} {what}; its card or its memory is faulty. The server ends, since its "
        "ranks would go on with different texts."
    )


def _word(decisions: Tensor, has_choice: Tensor, shard_broken: Tensor) -> Tensor:
    """i64 [R]: 62 bits of a hash of the decisions, then the two flags."""
    mixed = torch.full_like(decisions[:, 0], _FACTOR)
    for column in decisions.unbind(1):
        mixed = (mixed ^ column) * _FACTOR  # wraps around
        mixed = mixed ^ (mixed >> _SHIFT)
    return (mixed << 2) | (has_choice.long() << 1) | shard_broken.long()


def _odd_rank(words: Tensor) -> Tensor:
    """[ranks, R] -> i64 [R]: the first rank that fewest others agree with, -1 where all agree."""
    agreeing = (words[:, None] == words[None]).sum(1)  # [ranks, R]
    # Of two ranks that differ nobody knows which is right: name the later one.
    least = len(words) - 1 - agreeing.flip(0).argmin(0)
    return torch.where(agreeing.amin(0) == len(words), -1, least)


def _alone(broken: Tensor) -> Tensor:
    """bool [ranks, R] -> i64 [R]: the first broken rank where others are sound, else -1.

    Logits that are broken on every rank come from the model, and end their request only.
    """
    some = broken.any(0) & ~broken.all(0)
    return torch.where(some, broken.long().argmax(0), -1)
