"""Torch mixture of experts: deterministic routing and MXFP4 experts in fp64."""

import torch
import torch.nn.functional as F

from dspark.kernels.common.fp8 import decode_e8m0
from dspark.kernels.common.swiglu import swiglu_values
from dspark.kernels.moe.types import ExpertWeights, Route

SCALE_GROUP = 32  # columns per E8M0 scale of an MXFP4 row
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0..7; bit 3 is the sign
ROW_CHUNK = 256  # rows per fp64 temporary in prefill


def dequantise_mxfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """E2M1 pairs u8 [..., K/2] with E8M0 bytes u8 [..., K/32] -> f64 [..., K]."""
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=packed.device)
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    values = table.double()[nibbles.int()].unflatten(-1, (-1, SCALE_GROUP))
    return (values * decode_e8m0(scales).double().unsqueeze(-1)).flatten(-2)


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    tid2eid: torch.Tensor | None,
    token_ids: torch.Tensor,
    k: int,
    scale: float,
    renormalise: bool = True,
) -> Route:
    """Choose k experts per row by sqrt(softplus(logits)).

    logits: f32 [T, E]; bias: f32 [E], added for the choice only, ties go to the smaller id;
    tid2eid: i32 [vocab, k] replaces the choice in hash layers; token_ids: i64 [T], negative on
    padded rows; all contiguous. Weights are the unbiased scores, divided by (their sum + 1e-20)
    when `renormalise`, times `scale`. Raises ValueError when k exceeds E or the rows disagree.
    """
    scores = torch.sqrt(F.softplus(logits.double())).float()
    if tid2eid is None:
        ranked = scores if bias is None else scores + bias
        # A stable descending sort gives ties to the smaller id, unlike topk.
        experts = torch.sort(ranked, dim=1, descending=True, stable=True).indices[:, :k]
    else:
        experts = tid2eid[token_ids.clamp(min=0)].long()
    experts = torch.sort(experts, dim=1).values
    weights = scores.gather(1, experts).double()
    if renormalise:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    padded = (token_ids < 0).unsqueeze(1)
    weights = (weights * scale).float().masked_fill_(padded, 0.0)
    return Route(weights, experts.int().masked_fill_(padded, -1))


def moe_mxfp4(
    x: torch.Tensor,
    experts: ExpertWeights,
    route: Route,
    limit: float,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """y = sum_k weight_k * expert_k(x) + shared, this rank's part of the sum.

    x: bf16 or f32 [T, Hd]; limit: the SwiGLU clamp; shared: [T, Hd] output of the shared expert
    in f32 or x's dtype; all contiguous. Slots are added in ascending expert id, shared last,
    rounded once to x's dtype; rows whose experts are all -1 return `shared` (or 0). Raises
    ValueError when the shapes disagree.
    """
    if experts.w13.ndim != 3:
        raise ValueError("The reference cannot read experts that were rearranged for the kernels.")
    if x.shape[0] <= ROW_CHUNK:
        return _moe_rows(x, experts, route, limit, shared)
    parts = []
    for start in range(0, x.shape[0], ROW_CHUNK):
        rows = slice(start, start + ROW_CHUNK)
        chosen = Route(route.weights[rows], route.experts[rows])
        parts.append(
            _moe_rows(x[rows], experts, chosen, limit, None if shared is None else shared[rows])
        )
    return torch.cat(parts)


def _moe_rows(x, experts, route, limit, shared):
    k = route.experts.shape[1]
    assigned = route.experts.flatten()
    order = torch.argsort(assigned, stable=True)  # row*k+slot, grouped by expert
    counts = torch.bincount(assigned + 1, minlength=1).tolist()
    order = order[counts[0] :]  # drop padded rows (expert -1)

    hidden = x.double()[order // k]
    hidden = _per_expert(hidden, counts[1:], experts.dense13, experts.w13, experts.s13)
    gate, up = hidden.chunk(2, dim=-1)
    hidden = swiglu_values(gate, up, limit)
    if x.dtype != torch.float32:  # the oracle does not round it
        hidden = hidden.to(x.dtype).double()
    hidden = _per_expert(hidden, counts[1:], experts.dense2, experts.w2, experts.s2)

    slots = hidden.new_zeros(x.shape[0] * k, x.shape[1])
    slots[order] = hidden
    weights = route.weights.double().unsqueeze(1)
    total = torch.bmm(weights, slots.view(x.shape[0], k, x.shape[1])).squeeze(1)
    return (total if shared is None else total + shared).to(x.dtype)


def _per_expert(rows, counts, dense, packed, scales):
    """Rows f64 grouped by expert, `counts[e]` of them each, times that expert's matrix."""
    out = rows.new_empty(rows.shape[0], packed.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            matrix = (
                dequantise_mxfp4(packed[expert], scales[expert]) if dense is None else dense[expert]
            )
            end = start + count
            torch.mm(rows[start:end], matrix.t(), out=out[start:end])
            start = end
    return out
