"""What the target makes of the candidates: how many drafts stay, and what is emitted and kept.

R requests, V = depth + 1 rows of each, N tokens in the vocabulary.
"""

from collections.abc import Sequence

import torch

from dspark.kernels.accept import Accept, accept_chosen, accept_greedy, accept_sampled
from dspark.kernels.collective import Group, tp_argmax
from dspark.kernels.common.argmax import NOTHING, pack_argmax
from dspark.kernels.sampling import Cut, choose
from dspark.speculation.budget import VerifyRows
from dspark.speculation.packing import Packing
from dspark.speculation.propose import Proposal, proposal_law
from dspark.speculation.sampling import Requests, tails

# Requests whose draft distributions are gathered over the ranks at once: bounds the memory.
SLICE = 8


def accept(
    candidates: torch.Tensor,
    logits: torch.Tensor,
    proposal: Proposal | None,
    requests: Requests,
    rows: VerifyRows,
    group: Group,
    first_column: int | None = None,
    packing: Packing | None = None,
) -> Accept:
    """The same outcome on every rank, and the same bits in both layouts of the rows.

    What the target chooses by itself judges the drafts of greedy and of seeded requests. Those of
    requests that sample without a seed are judged by rejection, which accepts a few more. Where
    nothing was drafted there is nothing to judge: all emit what the target chooses, which has the
    law of the target for each of them.

    Args:
        candidates: i64 [R, V].
        logits: f32 [R * V, N] adjusted to what the requests asked for; tails are cut here. With a
            `packing` f32 [T, N].
        proposal: None where nothing was drafted; `rows` are one a request then.
        first_column: where `logits` holds only this rank's columns of the vocabulary, the token of
            the first; all requests are greedy then. None: all columns.
    """
    lengths = {
        "acceptable": rows.acceptable,
        "committed": requests.committed,
        "rows_run": rows.run,
    }
    first, over = first_column or 0, None if first_column is None else group
    if requests.params.all_greedy:
        if packing is None:
            return accept_greedy(candidates, logits, vocab_start=first, group=over, **lengths)
        choice = tp_argmax(pack_argmax(logits, first), over)
        return accept_chosen(candidates, packing.spread(choice, NOTHING), **lengths)
    law = requests if packing is None else packing.one_by_one(requests)
    cut = tails(logits, law.params)
    # For all requests: to leave out those judged by rejection would copy the others' logits.
    choice = choose(logits, law.params.temperature, law.seed, law.committed + 1, cut)
    if packing is not None:
        choice = packing.spread(choice, NOTHING)
    outcome = accept_chosen(candidates, choice, **lengths)
    if proposal is None:
        return outcome
    for some in _unseeded(requests):
        part = _reject(candidates, logits, cut, proposal, requests, rows, some, group, packing)
        for whole, of_some in zip(outcome, part, strict=True):
            whole.index_copy_(0, some, of_some)
    return outcome


def _unseeded(requests: Requests) -> Sequence[torch.Tensor]:
    """i64 indices of requests that sample without a seed, SLICE of them at a time."""
    if requests.unseeded == 0:
        return ()
    chosen = requests.seeded | (requests.params.temperature == 0)
    # Sorted rather than searched for: how many there are is known, so nothing waits for the device.
    return torch.argsort(chosen.to(torch.int8), stable=True)[: requests.unseeded].split(SLICE)


def _reject(
    candidates: torch.Tensor,
    logits: torch.Tensor,
    cut: Cut | None,
    proposal: Proposal,
    requests: Requests,
    rows: VerifyRows,
    some: torch.Tensor,
    group: Group,
    packing: Packing | None,
) -> Accept:
    """Judge the drafts of the requests `some` (i64 [S]) by rejection."""

    def of_some(by_row: torch.Tensor) -> torch.Tensor:
        """[rows, ...] -> [S, V, ...]; a row that does not run is never looked at."""
        if packing is not None:
            return by_row[packing.at[some]]
        return by_row.view(*candidates.shape, *by_row.shape[1:])[some]

    kept = of_some(logits)
    if cut is not None:
        each = Cut(*(of_some(column)[..., None] for column in cut))
        ids = torch.arange(kept.shape[-1], device=kept.device)
        stays = (kept > each.value) | ((kept == each.value) & (ids <= each.last))
        kept = kept.masked_fill(~stays, -torch.inf)
    return accept_sampled(
        candidates[some],
        kept.flatten(0, 1),
        proposal_law(proposal, some, group),
        acceptable=rows.acceptable[some],
        committed=requests.committed[some],
        temperature=requests.params.temperature[some],
        seed=requests.seed[some],
        rows_run=rows.run[some],
    )


def committed_slots(window_slots: torch.Tensor, commit_len: torch.Tensor) -> torch.Tensor:
    """i32 [R * V] window slots of the committed rows; -1 where a row was rejected.

    Args:
        window_slots: int [R, V] window slot of each verify row.
        commit_len: i32 [R] rows that are committed, from the first on.
    """
    row = torch.arange(window_slots.shape[1], device=window_slots.device)
    kept = torch.where(row < commit_len[:, None], window_slots, -1)
    return kept.to(torch.int32).flatten()
