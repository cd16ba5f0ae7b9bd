"""Greedy requests as the step functions of `dspark.speculation` see them, without a server."""

import torch

from dspark.kernels.accept import Accept
from dspark.speculation.accept import accept
from dspark.speculation.budget import VerifyRows
from dspark.speculation.propose import Proposal, with_bonus
from dspark.speculation.sampling import RequestParams, Requests


def greedy_request(slot: int, committed: int, bonus: int) -> Requests:
    """One request."""
    params = RequestParams(
        temperature=torch.zeros(1),
        top_k=torch.ones(1, dtype=torch.int32),
        top_p=torch.ones(1),
        min_p=torch.zeros(1),
        all_greedy=True,
        any_cut=False,
    )
    return Requests(
        slot=torch.tensor([slot]),
        committed=torch.tensor([committed]),
        bonus=torch.tensor([bonus]),
        seed=torch.zeros(1, dtype=torch.int64),
        seeded=torch.zeros(1, dtype=torch.bool),
        unseeded=0,
        params=params,
    )


def given(drafts: list[int]) -> Proposal:
    """A proposal of these drafts."""
    trust = torch.ones(1, len(drafts))
    return Proposal(torch.tensor([drafts]), None, trust, trust)


def judge(requests: Requests, proposal: Proposal, logits: torch.Tensor) -> Accept:
    """Accept with every row run. logits: f32 [V, N]."""
    rows = torch.full((1,), len(logits), dtype=torch.int32)
    candidates = with_bonus(requests, proposal.tokens)
    return accept(candidates, logits, proposal, requests, VerifyRows(rows, rows), None)
