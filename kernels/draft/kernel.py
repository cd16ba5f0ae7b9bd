"""Triton kernels of the draft ops.

A Markov step is one launch over blocks of the vocabulary. Each program adds the bias of the
previous token, keeps the corrected logits, and reports the best (value, id) of its block in eight
bytes; the next step's programs begin by taking the maximum of those reports. Over several ranks
the reports of a step are first reduced, then gathered.
"""

import torch
import triton
import triton.language as tl

from dspark.kernels.collective.transport import gather
from dspark.kernels.common.argmax_kernel import NOTHING, pack, token_of
from dspark.kernels.common.launch_table import LaunchConfig
from dspark.kernels.common.rng_kernel import DRAFT, TOKEN, gumbel, stream
from dspark.kernels.draft.types import Confidence, MarkovBlock

LAUNCH = {
    "markov_step": LaunchConfig(4, 2, {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_P": 64}),
    "winner": LaunchConfig(1, 1, {"BLOCK_P": 256}),
    "confidence": LaunchConfig(4, 1, {"BLOCK_K": 1024}),
}


@triton.jit
def _best(reports, rows, requests, count, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr):
    """Largest of `count` reports [count, requests] of each row, i64 [BLOCK_M]."""
    best = tl.full([BLOCK_M], NOTHING, tl.int64)
    for first in range(0, count, BLOCK_P):
        c = first + tl.arange(0, BLOCK_P)
        inside = (c[None, :] < count) & (rows[:, None] < requests)
        part = tl.load(reports + c[None, :] * requests + rows[:, None], mask=inside, other=NOTHING)
        best = tl.maximum(best, tl.max(part, 1))
    return best


# Small and read word by word, and where they begin depends on how many requests there are.
PER_REQUEST = [
    "prev", "reports", "temperature", "seeded", "seed", "committed", "tokens", "new_reports",
]  # fmt: skip


# Else a compilation for each.
@triton.jit(
    do_not_specialize=["k", "requests", "count"], do_not_specialize_on_alignment=PER_REQUEST
)
def _markov_step(
    base, prev, w1, w2, reports, temperature, seeded, seed, committed, logits, tokens, new_reports,
    k, requests, gamma, shard, vocab_start, count,
    RANK: tl.constexpr, SAMPLED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Program (vocabulary block, request block)."""
    block = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    rank = tl.arange(0, RANK)
    real = rows < requests
    inside = real[:, None] & (columns[None, :] < shard)

    # The first step has no reports: its token is given.
    previous = token_of(_best(reports, rows, requests, count, BLOCK_M, BLOCK_P))
    previous = tl.where(k == 0, tl.load(prev + rows, mask=real, other=0), previous)
    if (block == 0) & (k > 0):
        tl.store(tokens + rows * gamma + k - 1, previous, mask=real)

    e = tl.load(w1 + previous[:, None] * RANK + rank[None, :], mask=real[:, None], other=0)
    w = tl.load(
        w2 + columns[None, :].to(tl.int64) * RANK + rank[:, None],
        mask=columns[None, :] < shard,
        other=0,
    )
    at = (rows[:, None].to(tl.int64) * gamma + k) * shard + columns[None, :]
    value = tl.load(base + at, mask=inside, other=-float("inf")) + tl.dot(e, w)
    if logits is not None:
        tl.store(logits + at, value, mask=inside)

    if SAMPLED:
        # A seeded row adds the noise the target will add at this position.
        position = tl.load(committed + rows, mask=real, other=0) + k + 1
        shared = tl.load(seeded + rows, mask=real, other=0) != 0
        purpose = tl.where(shared, TOKEN, k + DRAFT)
        a, b = stream(tl.load(seed + rows, mask=real, other=0), position, purpose)
        t = tl.load(temperature + rows, mask=real, other=0.0)
        noise = gumbel(a[:, None], b[:, None], (vocab_start + columns)[None, :])
        value += t[:, None] * noise
    value = tl.where(inside, value, -float("inf"))
    report = tl.max(pack(value, (vocab_start + columns)[None, :]), 1)
    tl.store(new_reports + block * requests + rows, report, mask=real)


@triton.jit
def _winner(
    reports, best, tokens, k, requests, gamma, count, BLOCK_P: tl.constexpr
):  # fmt: skip
    """Program r: the best report of a request, and its token as draft k."""
    r = tl.program_id(0)
    row = r + tl.arange(0, 1)
    packed = _best(reports, row, requests, count, 1, BLOCK_P)
    tl.store(best + row, packed)
    tl.store(tokens + row * gamma + k, token_of(packed))


@triton.jit
def _confidence(
    hidden, prev_tokens, w1, proj, temperature, probability, logit, gamma, width, rank,
    RANK_P2: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (request, step): a dot product of the hidden row and the previous token's row."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, width, BLOCK_K):
        i = first + tl.arange(0, BLOCK_K)
        x = tl.load(hidden + row * width + i, mask=i < width, other=0).to(tl.float32)
        total += x * tl.load(proj + i, mask=i < width, other=0)
    j = tl.arange(0, RANK_P2)
    e = tl.load(w1 + tl.load(prev_tokens + row) * rank + j, mask=j < rank, other=0)
    bias = e.to(tl.float32) * tl.load(proj + width + j, mask=j < rank, other=0)
    z = tl.sum(total, 0) + tl.sum(bias, 0)
    p = 1 / (1 + tl.exp(-z / tl.load(temperature + row % gamma)))
    tl.store(logit + row, z)
    tl.store(probability + row, tl.where(p == p, p, 0.0))


GREEDY = (None,) * 4  # in place of a DraftSampling


def markov_block(
    base, prev, w1, w2, *, sampling=None, keep_logits=True, vocab_start=0, group=None
):  # fmt: skip
    requests, gamma, shard = base.shape
    device = base.device
    rank = w1.shape[1]
    if rank < 16 or rank & (rank - 1):
        raise ValueError(f"the Markov rank must be a power of two >= 16 on CUDA, got {rank}")
    base, launch, finish = base.contiguous(), LAUNCH["markov_step"], LAUNCH["winner"]
    blocks = triton.cdiv(shard, launch.constexprs["BLOCK_N"])
    logits = torch.empty_like(base) if keep_logits else None
    tokens = torch.empty(requests, gamma, dtype=torch.int64, device=device)
    best = torch.empty(1, requests, dtype=torch.int64, device=device)
    # Step k reads the reports of step k - 1 while writing its own.
    spare = torch.empty(2, blocks, requests, dtype=torch.int64, device=device)
    reports = spare[1, :0]
    if requests == 0:
        return MarkovBlock(tokens, logits)

    def reduce_reports(k: int) -> None:
        _winner[(requests,)](
            reports, best, tokens, k, requests, gamma, reports.shape[0],
            **finish.keywords,
        )  # fmt: skip

    for k in range(gamma):
        new_reports = spare[k % 2]
        _markov_step[(blocks, triton.cdiv(requests, launch.constexprs["BLOCK_M"]))](
            base, prev, w1, w2.weight, reports, *(sampling or GREEDY), logits,
            tokens, new_reports, k, requests, gamma, shard, vocab_start, reports.shape[0],
            RANK=rank, SAMPLED=sampling is not None,
            **launch.keywords,
        )  # fmt: skip
        reports = new_reports
        if group is not None and group.size() > 1:
            reduce_reports(k)
            reports = gather(best[0], group, "argmax")
    reduce_reports(gamma - 1)
    return MarkovBlock(tokens, logits)


def confidence(hidden, prev_tokens, w1, proj, temperature):
    requests, gamma, width = hidden.shape
    probability = torch.empty(requests, gamma, dtype=torch.float32, device=hidden.device)
    logit = torch.empty_like(probability)
    if requests * gamma:
        launch = LAUNCH["confidence"]
        _confidence[(requests * gamma,)](
            hidden.contiguous(), prev_tokens.contiguous(), w1, proj, temperature, probability,
            logit, gamma, width, w1.shape[1], RANK_P2=triton.next_power_of_2(w1.shape[1]),
            **launch.keywords,
        )  # fmt: skip
    return Confidence(probability, logit)
