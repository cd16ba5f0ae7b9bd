"""What a decode step would take on a card that nobody has measured.

    step = bytes read / (half of the card's bandwidth) + launches x 4.6 us + sums over the ranks

The two figures of a launch and of the bandwidth are fitted to one rank's steps on an H200
(`bench/results/decode-step-h200.json`, within a tenth). The time of a sum is derived, not
measured, for cards that cannot read each other's memory. Nothing here was measured on an Ada card.
"""

import functools
from typing import NamedTuple

from dspark.host.memory_budget import Load
from dspark.host.pool_sizes import layers_of
from dspark.kernels.collective import GATHERED_ROWS
from dspark.kernels.common.index_pages import PACKED_STRIDE
from dspark.kernels.common.kv_pages import page_stride
from dspark.target.caches import C4_PER_PAGE, C128_PER_PAGE, PAGE_TOKENS
from dspark.target.checkpoint.names import TensorSpec, draft_tensors, target_tensors
from dspark.target.config import ModelConfig
from dspark.target.sharding import split_axis

BANDWIDTH_USED = 0.5  # of the data sheet's
LAUNCH = 4.6e-6  # seconds: a launch in a graph, with what its kernel waits for besides bytes
LAUNCHES = {0: 18, 4: 23, 128: 21}  # of a layer, by compression ratio
OUTSIDE = 6  # launches of embedding, metadata and head
DRAFT_OUTSIDE = 20  # launches of metadata, heads, the Markov block and accepting
EXCHANGE = 40e-6  # seconds that a small message takes to all ranks through host memory
EXCHANGED = 6e9  # bytes a second that one rank receives while all ranks exchange
DECISIONS = 2  # small exchanges by which ranks agree
TYPICAL_TOKENS = 4096  # of a request, where its context allows as many


class Step(NamedTuple):
    """Seconds of one decode step; `read` is in bytes of one card."""

    read: float
    reading: float
    launching: float
    summing: float

    @property
    def seconds(self) -> float:
        return self.reading + self.launching + self.summing


def experts_touched(config: ModelConfig, rows: int) -> float:
    """Share of a layer's experts that `rows` rows choose, as if each chose at random."""
    return 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** rows


class Held(NamedTuple):
    """Bytes of one rank's weights, but for tables of which a step reads single rows."""

    experts: float  # the routed ones
    rest: float


def held(table: dict[str, TensorSpec], tp: int) -> Held:
    experts = rest = 0.0
    for name, spec in table.items():
        share = spec.nbytes / (1 if split_axis(name) is None else tp)
        if ".ffn.experts." in name:
            experts += share
        elif name != "embed.weight" and not name.endswith(("tid2eid", "markov_w1.weight")):
            rest += share
    return Held(experts, rest)


@functools.cache
def held_by_target(config: ModelConfig, tp: int) -> Held:
    return held(target_tensors(config), tp)


@functools.cache
def held_by_draft(config: ModelConfig, tp: int) -> Held:
    """With the head, which the draft borrows from the target."""
    head = 2 * config.vocab_size * config.hidden_size / tp
    own = held(draft_tensors(config), tp)
    return own._replace(rest=own.rest + head)


def weights_read(weights: Held, config: ModelConfig, rows: int) -> float:
    """Bytes that a step of `rows` rows reads of them."""
    return weights.experts * experts_touched(config, rows) + weights.rest


def cache_read(load: Load, requests: int, tokens: int) -> int:
    """Bytes of cache that a step reads, for requests of `tokens` tokens each."""
    c, pages = load.config, -(-tokens // PAGE_TOKENS)
    c4, c128 = len(layers_of(c, 4)), len(layers_of(c, 128))
    window = c.num_hidden_layers * page_stride(PAGE_TOKENS) * c.sliding_window // PAGE_TOKENS
    chosen = min(c.index_topk, tokens // 4) * page_stride(C4_PER_PAGE) // C4_PER_PAGE
    whole = c4 * PACKED_STRIDE + c128 * page_stride(C128_PER_PAGE)
    return requests * (pages * whole + window + c4 * load.verify_width * chosen)


def sum_over_ranks(config: ModelConfig, tp: int, rows: int) -> float:
    """Seconds of one sum of [rows, hidden] in bf16, as `tp_sum` exchanges it."""
    if tp == 1:
        return 0.0
    size = 2 * rows * config.hidden_size
    if rows <= GATHERED_ROWS:
        return EXCHANGE + (tp - 1) * size / EXCHANGED
    return 2 * (EXCHANGE + (tp - 1) * size / tp / EXCHANGED)


def step(load: Load, bandwidth: float, requests: int, tokens: int) -> Step:
    """Project one step of `requests` requests.

    Args:
        load: how the model is divided; `verify_width` 1 is a step without drafts.
        bandwidth: bytes a second of the card, from its data sheet.
        tokens: of each request.
    """
    c, tp, rows = load.config, load.tp, requests * load.verify_width
    read = weights_read(held_by_target(c, tp), c, rows) + cache_read(load, requests, tokens)
    launches = OUTSIDE + sum(LAUNCHES[ratio] for ratio in c.compress_ratios)
    summing = (2 * c.num_hidden_layers + 1) * sum_over_ranks(c, tp, rows)
    if load.stages:
        assert c.dspark is not None  # it has stages
        gamma = load.verify_width - 1
        read += weights_read(held_by_draft(c, tp), c, requests * gamma)
        launches += DRAFT_OUTSIDE + load.stages * LAUNCHES[0]
        summing += (2 * load.stages + 1) * sum_over_ranks(c, tp, requests * gamma)
        summing += (gamma + DECISIONS) * EXCHANGE if tp > 1 else 0.0
    return Step(read, read / (BANDWIDTH_USED * bandwidth), launches * LAUNCH, summing)


def assumptions(load: Load, bandwidth: float, tokens: int) -> list[str]:
    """What the figures stand on, one sentence each."""
    lines = [
        f"the card reads {bandwidth / 1e9:,.0f} GB/s by its data sheet, of which a step uses "
        f"{BANDWIDTH_USED:.0%}, as on one H200 rank",
        f"each launch of the step's graph takes {LAUNCH * 1e6:.1f} us beside its bytes, as on one "
        "H200 rank",
        f"each request holds {tokens:,} tokens and chooses its experts at random",
        "the host prepares a step while the card computes the one before",
    ]
    if load.tp > 1:
        lines.append(
            f"ranks exchange through host memory: {EXCHANGE * 1e6:.0f} us a message and "
            f"{EXCHANGED / 1e9:.0f} GB/s into each card (derived for cards without peer access, "
            "not measured); logits stay where they are, as with greedy requests"
        )
    return lines
