"""Triton kernels of the accept ops.

Greedy: statistics (the best id of every row and vocabulary chunk), then one program per request
that reports. Chosen: the reporting program alone. Sampled: statistics of target rows and of draft
rows, one program per draft that tests it, a race for the next token over vocabulary chunks, then
the reporting program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.accept.types import Accept
from dspark.kernels.collective.transport import gather
from dspark.kernels.common.argmax_kernel import NOTHING, pack, token_of
from dspark.kernels.common.launch_table import LaunchConfig
from dspark.kernels.common.rng_kernel import ACCEPT, RESAMPLE, exponential, stream, uniform

LAUNCH = {
    "row_best": LaunchConfig(4, 1, {"BLOCK": 1024}),
    "row_sums": LaunchConfig(4, 1, {"BLOCK": 2048}),
    "test": LaunchConfig(1, 1, {}),
    "race": LaunchConfig(4, 1, {"BLOCK": 2048}),
    "report": LaunchConfig(1, 1, {"BLOCK_C": 64}),
}

CHUNK = 8192  # tokens of one program; fixes the order of every sum over the vocabulary


@triton.jit
def _weight(x, top):
    """exp(x - top); with an infinite top the infinities share all weight; no top, no weight."""
    finite = tl.exp(x - tl.where(tl.abs(top) == float("inf"), 0.0, top))
    w = tl.where(top == float("inf"), (x == float("inf")).to(tl.float32), finite)
    return tl.where(top == -float("inf"), 0.0, w)


@triton.jit
def _scaled(logits, at, mask, t):
    x = tl.load(logits + at, mask=mask, other=-float("inf")).to(tl.float32) / t
    return tl.where(x == x, x, -float("inf"))


@triton.jit
def _row_best_kernel(
    logits, best, vocab, vocab_start, chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row, chunk): the best packed (value, id)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.minimum((chunk + 1) * CHUNK, vocab)
    packed = tl.full([BLOCK], NOTHING, tl.int64)
    for first in range(chunk * CHUNK, end, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + i, mask=i < end, other=-float("inf")).to(tl.float32)
        packed = tl.maximum(packed, pack(x, vocab_start + i))
    tl.store(best + row * chunks + chunk, tl.max(packed, 0))


@triton.jit
def _row_sums_kernel(
    logits, temperature, top, total, rows_a_request, vocab, chunks,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the maximum and the exp-sum of logits / temperature."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.minimum((chunk + 1) * CHUNK, vocab)
    t = tl.maximum(tl.load(temperature + row // rows_a_request), 1e-6)
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(chunk * CHUNK, end, BLOCK):
        i = first + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, _scaled(logits, row * vocab + i, i < end, t))
    m = tl.max(highest, 0)
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(chunk * CHUNK, end, BLOCK):
        i = first + tl.arange(0, BLOCK)
        mass += _weight(_scaled(logits, row * vocab + i, i < end, t), m)
    tl.store(top + row * chunks + chunk, m)
    tl.store(total + row * chunks + chunk, tl.sum(mass, 0))


@triton.jit
def _normaliser(top, total, row, chunks):
    """(maximum, exp-sum, at least 1) of a whole row from its chunks, ascending."""
    m = -float("inf")
    for c in range(chunks):
        m = tl.maximum(m, tl.load(top + row * chunks + c))
    mass = 0.0
    for c in range(chunks):
        mass += tl.load(total + row * chunks + c) * _weight(tl.load(top + row * chunks + c), m)
    return m, mass


@triton.jit
def _probability(logits, at, t, m, mass):
    return _weight(_scaled(logits, at, True, t), m) / tl.maximum(mass, 1.0)


@triton.jit
def _best_of_row(best, row, rows, parts, chunks, BLOCK_C: tl.constexpr):
    """Largest packed pair of one row over `parts` ranks' [rows, chunks] reports."""
    result = tl.full([BLOCK_C], NOTHING, tl.int64)
    for first in range(0, parts * chunks, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        at = (c // chunks) * rows * chunks + row * chunks + c % chunks
        result = tl.maximum(result, tl.load(best + at, mask=c < parts * chunks, other=NOTHING))
    return tl.max(result, 0)


@triton.jit
def _test(
    candidates, logits, draft_logits, temperature, seed, committed, p_top, p_total, q_top, q_total,
    passed, p_norm, q_norm, vocab, chunks, V: tl.constexpr,
):  # fmt: skip
    """Program (request, row k): the row's normaliser, and whether it accepts draft k."""
    r, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = r * V + k
    t = tl.maximum(tl.load(temperature + r), 1e-6)
    p_m, p_mass = _normaliser(p_top, p_total, row, chunks)
    tl.store(p_norm + row * 2, p_m)
    tl.store(p_norm + row * 2 + 1, p_mass)
    if k < V - 1:
        y = tl.load(candidates + row + 1)
        p = _probability(logits, row * vocab + y, t, p_m, p_mass)
        q_row = r * (V - 1) + k
        q = 1.0
        q_mass = 1.0
        if draft_logits is not None:
            q_m, q_mass = _normaliser(q_top, q_total, q_row, chunks)
            q = _probability(draft_logits, q_row * vocab + y, t, q_m, q_mass)
            tl.store(q_norm + q_row * 2, q_m)
            tl.store(q_norm + q_row * 2 + 1, q_mass)
        position = tl.load(committed + r) + k + 1
        a, b = stream(tl.load(seed + r), position, ACCEPT)
        sampled = (p_mass > 0) & (q_mass > 0) & (uniform(a, b) * q < p)
        tl.store(passed + q_row, sampled.to(tl.int32))


@triton.jit
def _leading(passed, r, run, V: tl.constexpr):
    """Drafts of request r that passed before the first that did not, within `run` rows."""
    going = tl.full([], 1, tl.int32)
    leading = tl.full([], 0, tl.int32)
    for k in tl.static_range(V - 1):
        going = going * tl.load(passed + r * (V - 1) + k) * (run - 1 > k).to(tl.int32)
        leading += going
    return leading


@triton.jit
def _race(
    candidates, logits, draft_logits, temperature, seed, committed, acceptable, passed, p_norm,
    q_norm, race, vocab, chunks, requests,
    V: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (request, chunk): the first finisher of its tokens in two races, one weighted by the
    residual max(p - q, 0), one by p for when there is no residual."""
    r, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    limit = tl.load(acceptable + r).to(tl.int32)
    accepted = _leading(passed, r, limit, V)
    row = r * V + accepted
    rejected = accepted < limit - 1
    t = tl.maximum(tl.load(temperature + r), 1e-6)
    p_m, p_mass = tl.load(p_norm + row * 2), tl.load(p_norm + row * 2 + 1)
    draft = tl.load(candidates + r * V + tl.minimum(accepted + 1, V - 1))
    q_row = r * (V - 1) + tl.minimum(accepted, V - 2)
    a, b = stream(tl.load(seed + r), tl.load(committed + r) + accepted + 1, RESAMPLE)
    end = tl.minimum((chunk + 1) * CHUNK, vocab)
    left = tl.full([BLOCK], NOTHING, tl.int64)
    whole = tl.full([BLOCK], NOTHING, tl.int64)
    for first in range(chunk * CHUNK, end, BLOCK):
        i = first + tl.arange(0, BLOCK)
        p = _weight(_scaled(logits, row * vocab + i, i < end, t), p_m) / tl.maximum(p_mass, 1.0)
        if draft_logits is None:
            q = (i == draft).to(tl.float32)
        else:
            q_m, q_mass = tl.load(q_norm + q_row * 2), tl.load(q_norm + q_row * 2 + 1)
            q = _weight(_scaled(draft_logits, q_row * vocab + i, i < end, t), q_m)
            q = q / tl.maximum(q_mass, 1.0)
        residual = tl.where(rejected, tl.maximum(p - q, 0.0), p)
        noise = exponential(a, b, i)
        left = tl.maximum(left, tl.where(residual > 0, pack(residual / noise, i), NOTHING))
        whole = tl.maximum(whole, tl.where(p > 0, pack(p / noise, i), NOTHING))
    tl.store(race + r * chunks + chunk, tl.max(left, 0))
    tl.store(race + (requests + r) * chunks + chunk, tl.max(whole, 0))


@triton.jit
def _report(
    candidates, best, passed, race, acceptable, rows_run, committed,
    out_accepted, out_bonus, out_commit, out_new_len, out_trimmed, out_tokens,
    requests, parts, chunks,
    SAMPLED: tl.constexpr, V: tl.constexpr, V_P2: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Program r: everything one request reports. Drafts that a choice judges are tested here."""
    r = tl.program_id(0).to(tl.int64)
    limit = tl.load(acceptable + r).to(tl.int32)
    run = tl.load(rows_run + r).to(tl.int32)
    if SAMPLED:
        leading = _leading(passed, r, run, V)
    else:
        going = tl.full([], 1, tl.int32)
        leading = tl.full([], 0, tl.int32)
        for k in tl.static_range(V - 1):
            choice = _best_of_row(best, r * V + k, requests * V, parts, chunks, BLOCK_C)
            match = (choice != NOTHING) & (token_of(choice) == tl.load(candidates + r * V + k + 1))
            going = going * match.to(tl.int32) * (run - 1 > k).to(tl.int32)
            leading += going
    accepted = tl.minimum(leading, tl.maximum(limit - 1, 0))

    if SAMPLED:
        bonus = _best_of_row(race, r, requests, 1, chunks, BLOCK_C)
        fallback = _best_of_row(race, requests + r, requests, 1, chunks, BLOCK_C)
        bonus = tl.where(bonus == NOTHING, fallback, bonus)
    else:
        bonus = _best_of_row(best, r * V + accepted, requests * V, parts, chunks, BLOCK_C)
    token = token_of(bonus)
    commit = tl.where(limit > 0, accepted + 1, 0)
    tl.store(out_accepted + r, accepted)
    tl.store(out_bonus + r, token)
    tl.store(out_commit + r, commit)
    tl.store(out_new_len + r, tl.load(committed + r).to(tl.int64) + commit)
    tl.store(out_trimmed + r, leading - accepted)
    j = tl.arange(0, V_P2)
    kept = tl.load(candidates + r * V + j + 1, mask=j < accepted, other=0)
    tl.store(out_tokens + r * V + j, tl.where(j == accepted, token, kept), mask=j < V)


def accept_greedy(
    candidates, logits, *, acceptable, committed, rows_run=None, vocab_start=0, group=None
):
    best = _row_best(logits, vocab_start)
    parts = gather(best, group, "argmax") if group is not None and group.size() > 1 else best[None]
    return _run_report(candidates, parts, acceptable, committed, rows_run)


def accept_chosen(candidates, choice, *, acceptable, committed, rows_run=None):
    return _run_report(candidates, choice[None, :, None], acceptable, committed, rows_run)


def accept_sampled(
    candidates, logits, draft_logits, *, acceptable, committed, temperature, seed, rows_run=None
):
    requests, v = candidates.shape
    vocab = logits.shape[1]
    chunks = triton.cdiv(vocab, CHUNK)
    device = logits.device
    candidates, logits = candidates.contiguous(), logits.contiguous()
    p_top, p_total = _row_sums(logits, temperature, v)
    q_top = q_total = None
    if draft_logits is not None:
        draft_logits = draft_logits.contiguous()
        q_top, q_total = _row_sums(draft_logits.view(-1, vocab), temperature, v - 1)
    passed = torch.empty(requests, v - 1, dtype=torch.int32, device=device)
    p_norm = torch.empty(requests, v, 2, device=device)
    q_norm = torch.empty(requests, v - 1, 2, device=device)
    race = torch.empty(2, requests, chunks, dtype=torch.int64, device=device)
    if requests:
        launch = LAUNCH["test"]
        _test[(requests, v)](
            candidates, logits, draft_logits, temperature, seed, committed, p_top, p_total, q_top,
            q_total, passed, p_norm, q_norm, vocab, chunks, V=v,
            **launch.keywords,
        )  # fmt: skip
        launch = LAUNCH["race"]
        _race[(requests, chunks)](
            candidates, logits, draft_logits, temperature, seed, committed, acceptable, passed,
            p_norm, q_norm, race, vocab, chunks, requests, V=v, CHUNK=CHUNK,
            **launch.keywords,
        )  # fmt: skip
    return _run_report(candidates, None, acceptable, committed, rows_run, passed, race)


def _row_best(logits: Tensor, vocab_start: int) -> Tensor:
    """Best packed (value, id) of each row and chunk, i64 [rows, chunks]."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    best = torch.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    launch = LAUNCH["row_best"]
    if rows:
        _row_best_kernel[(rows, chunks)](
            logits.contiguous(), best, vocab, vocab_start, chunks, CHUNK=CHUNK,
            **launch.keywords,
        )  # fmt: skip
    return best


def _row_sums(logits: Tensor, temperature: Tensor, rows_a_request: int) -> tuple[Tensor, Tensor]:
    """(maximum, exp-sum) of logits / temperature for each row and chunk, f32 [rows, chunks]."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    top = torch.empty(rows, chunks, device=logits.device)
    total = torch.empty_like(top)
    launch = LAUNCH["row_sums"]
    if rows:
        _row_sums_kernel[(rows, chunks)](
            logits, temperature, top, total, rows_a_request, vocab, chunks, CHUNK=CHUNK,
            **launch.keywords,
        )  # fmt: skip
    return top, total


def _run_report(
    candidates: Tensor,
    best: Tensor | None,  # [ranks, rows, chunks]
    acceptable: Tensor,
    committed: Tensor,
    rows_run: Tensor | None,
    passed: Tensor | None = None,
    race: Tensor | None = None,
) -> Accept:
    requests, v = candidates.shape
    if best is not None:
        parts, _, chunks = best.shape
    else:
        assert race is not None
        parts, chunks = 1, race.shape[2]

    def i32() -> Tensor:
        return torch.empty(requests, dtype=torch.int32, device=candidates.device)

    def i64(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=candidates.device)

    out = Accept(i32(), i64(requests), i32(), i64(requests), i32(), i64(requests, v))
    launch = LAUNCH["report"]
    if requests:
        _report[(requests,)](
            candidates.contiguous(), best, passed, race, acceptable,
            acceptable if rows_run is None else rows_run, committed, *out,
            requests, parts, chunks,
            SAMPLED=passed is not None, V=v, V_P2=triton.next_power_of_2(v),
            **launch.keywords,
        )  # fmt: skip
    return out
