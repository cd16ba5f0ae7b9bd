"""How the memory of a card is divided: computed, before or after anything is loaded.

Weights, pools, rope tables and rings are exact. What a forward needs besides its inputs is bounded
by adding up the tensors that are alive at once at the widest point of a layer (R rows, one layer
at a time). Everything is in bytes of one card; ranks are alike.
"""

from collections.abc import Iterator
from typing import NamedTuple

from dspark.host.pool_sizes import PoolBytes, context_pages, pool_bytes, window_pages
from dspark.target.caches import PAGE_TOKENS
from dspark.target.checkpoint.names import draft_tensors, target_tensors
from dspark.target.config import ModelConfig
from dspark.target.sharding import split_axis

MIB, GIB = 1 << 20, 1 << 30
MIN_TOKENS = 2 * PAGE_TOKENS  # of a pool that can hold a request
RESERVE = 300 * MIB  # left alone: what allocators waste, code that the driver loads later
NCCL = 300 * MIB  # buffers that NCCL takes on more than one card, measured as 200 to 400 MiB
# Taken by CUDA, NCCL and the driver before weights are loaded. What was given is refused only where
# even the least is too much; what is chosen leaves room for the most. A worker measures it.
CONTEXT_LEAST, CONTEXT_MOST = 600 * MIB, 800 * MIB
FRAGMENTS = 160 * MIB  # more that a chosen pool leaves: what torch reserves beyond what it uses

# Bounds inside the kernels; tests compare them with the sources.
INDEX_SCORES = 64 * MIB  # of one part of a prompt's rows
EXPERT_SLOTS = 64 * MIB  # of one range of columns
REPEATED_SLOTS = 1 << 16  # listed slots up to which each has a key of its own
DECODE_ROWS = 64  # rows whose attention partials exist at once
SPLIT_KEYS = 64  # keys of one partial

GRAPH = 6 * MIB  # of the driver, for one captured size of one runner
TOKEN_TABLES = 80  # bytes: SGLang's static inputs of both runners, the map to window slots
VOCABULARY_TABLES = 6  # bytes a token and request: what penalties keep
CHUNKS = (8192, 4096, 2048, 1024, 512)
PREFERRED_REQUESTS = 8
MOST_REQUESTS = 48
TOKENS_PER_REQUEST = 4096  # fewer than this a request, and fewer requests are served by default
CONTEXT_STEP = 1024
KEPT_CONTEXTS = 4  # a small model takes no more of a large card than this many a request


class Load(NamedTuple):
    """What shall be served."""

    config: ModelConfig
    tp: int  # ranks
    verify_width: int  # rows a request has in a decode step; 1 without drafts
    requests: int
    context: int  # tokens of the longest request
    prompt_rows: int  # most rows of a prompt batch
    window_ratio: float  # least share of the full pool that the window pool gets
    graphs: bool  # decode steps are captured

    @property
    def stages(self) -> int:
        dspark = self.config.dspark
        return dspark.stages if dspark is not None and self.verify_width > 1 else 0

    @property
    def captured(self) -> int:
        """Layers whose outputs the draft is given."""
        dspark = self.config.dspark
        return len(dspark.target_layer_ids) if dspark is not None and self.stages else 0

    @property
    def pool(self) -> PoolBytes:
        return pool_bytes(self.config, self.stages, self.verify_width)

    @property
    def context_pages(self) -> int:
        return context_pages(self.context)

    def window_pages(self, full_pages: int) -> int:
        return window_pages(full_pages, self.requests, self.prompt_rows, self.window_ratio)


class Weights(NamedTuple):
    target: int
    draft: int


class Budget(NamedTuple):
    """Bytes of one card, in the order of the table; the pools hold `tokens`."""

    tokens: int
    weights: int
    draft: int
    rope: int
    workspace: int  # of the widest prompt batch, or of sampling
    graphs: int
    rings: int  # C128, by request
    window: int  # latents and C4 rings of window pages
    entries: int  # compressed entries and indexer keys
    tables: int  # SGLang's, by token and by request
    reserve: int

    @property
    def total(self) -> int:
        return sum(self[1:])

    @property
    def pools(self) -> int:
        return self.rings + self.window + self.entries


class BudgetError(ValueError):
    """What was asked for does not fit; the message is one sentence with numbers."""


def checkpoint_weights(config: ModelConfig, tp: int, draft: bool) -> Weights:
    """Bytes of one rank's weights, as the checkpoint's tensors have them."""

    def share(table) -> int:
        return sum(
            spec.nbytes // (1 if split_axis(name) is None else tp) for name, spec in table.items()
        )

    return Weights(share(target_tensors(config)), share(draft_tensors(config)) if draft else 0)


def prompt_workspace(load: Load, tokens: int) -> int:
    """Most that a prompt batch takes while it runs, where the pool holds `tokens`.

    A short batch gathers a key anew for every row that reads it, a long one gathers it once.
    """
    c = load.config
    short = load._replace(prompt_rows=min(load.prompt_rows, REPEATED_SLOTS // row_keys(load) + 1))
    # C4 entries that a whole batch may attend.
    entries = min(tokens, load.requests * load.context, 4 * load.prompt_rows * c.index_topk) // 4
    once = entries + load.prompt_rows + PAGE_TOKENS
    return max(
        batch_workspace(short, REPEATED_SLOTS),
        batch_workspace(load, once) + 6 * tokens // 4,
    )


def row_keys(load: Load) -> int:
    """Most window slots and compressed entries that one row may attend."""
    return load.config.sliding_window + max(load.config.index_topk, 2 * load.context_pages)


def batch_workspace(load: Load, gathered: int) -> int:
    """Most that a batch of `prompt_rows` takes, `gathered` keys of one layer included."""
    c = load.config
    rows, hidden, ranks = load.prompt_rows, c.hidden_size, load.tp
    heads, experts = c.num_attention_heads // ranks, c.num_experts_per_tok
    width = 2 * c.moe_intermediate_size // ranks
    c128 = 2 * load.context_pages
    # All the time: the streams, captured outputs, the step's own lists, embeddings.
    held = hidden * (8 + 2 * load.captured + 2) + 4 * (c.sliding_window + c128 + 24)
    queries = 2 * (heads * c.head_dim + c.index_n_heads * c.index_head_dim)
    projected = 2 * hidden + queries + 4 * c.q_lora_rank + 2 * c.head_dim
    raw = 4 * (4 * c.head_dim + 4 * c.index_head_dim + c.index_n_heads)
    stages = (
        # Spreading over new streams while the old ones live, with the partial sums of the next.
        rows * hidden * (8 + 2 + 2 + 4 + (6 if ranks > 1 else 0)),
        # Choosing entries.
        rows * (projected + raw + 2 * c.index_n_heads * c.index_head_dim)
        + 5 * min(INDEX_SCORES, rows * c128 * 128) // 4,
        # Attending: queries, outputs, lists of slots in i32 and i64, gathered keys.
        rows * (projected + 4 * heads * c.head_dim + 28 * row_keys(load))
        + gathered * 2 * c.head_dim,
        # Experts: routing, hidden columns of every choice, the shared expert in f32.
        rows * (hidden * (2 + 2 + 4) + experts * (width + 40) + 8 * c.n_routed_experts + 4 * width)
        + min(EXPERT_SLOTS, 4 * rows * experts * hidden),
        # What the draft learns: captured outputs side by side and quantised.
        rows * hidden * (3 * load.captured + 4),
    )
    return rows * held + max(stages)


def sampling_workspace(load: Load) -> int:
    """Logits of the widest step: of target, draft, after cutting tails, and one to spare."""
    copies = 4 if load.verify_width > 1 else 3
    return copies * 4 * load.requests * load.verify_width * load.config.vocab_size


def step_workspace(load: Load) -> int:
    """Most that the widest decode or verify step takes while it runs; a graph keeps it."""
    c, rows = load.config, load.requests * load.verify_width
    keys = max(c.index_topk, 2 * load.context_pages)
    partials = -(-c.sliding_window // SPLIT_KEYS) - (-keys // SPLIT_KEYS)
    heads = c.num_attention_heads // load.tp
    attention = min(rows, DECODE_ROWS) * partials * heads * (c.head_dim + 2) * 4
    return batch_workspace(load._replace(prompt_rows=rows), 0) + attention


def graph_bytes(load: Load) -> int:
    """Captured steps: their common workspace, outputs of every size, and the driver's part."""
    if not load.graphs:
        return 0
    c = load.config
    sizes = graph_sizes(load.requests)
    output = 4 * c.vocab_size // load.tp + 2 * c.hidden_size * (1 + load.captured)
    runners = 2 if load.stages else 1
    return (
        step_workspace(load)
        + sum(sizes) * load.verify_width * output * runners
        + len(sizes) * runners * GRAPH
    )


def graph_sizes(requests: int) -> list[int]:
    """Batch sizes that are captured: 1, 2, 4, then every eighth, and the largest."""
    return sorted({s for s in (1, 2, 4, *range(8, requests, 8)) if s < requests} | {requests})


def budget(load: Load, weights: Weights, pages: int) -> Budget:
    """What serving `load` with a full pool of `pages` takes."""
    pool, tokens = load.pool, pages * PAGE_TOKENS
    slots = load.requests + 1
    return Budget(
        tokens=tokens,
        weights=weights.target,
        draft=weights.draft,
        rope=2 * load.context_pages * PAGE_TOKENS * load.config.qk_rope_head_dim * 4,
        workspace=max(prompt_workspace(load, tokens), sampling_workspace(load)),
        graphs=graph_bytes(load),
        rings=slots * pool.slot,
        window=(load.window_pages(pages) + 1) * pool.window_page,
        entries=(pages + 1) * pool.full_page,
        tables=TOKEN_TABLES * tokens
        + slots * (4 * load.context + VOCABULARY_TABLES * load.config.vocab_size),
        reserve=RESERVE + (NCCL if load.tp > 1 else 0),
    )


def most_pages(load: Load, weights: Weights, available: int, static: int | None = None) -> int:
    """Pages of the largest full pool that fits, 0 if none does.

    available: bytes for everything in the table. static: bound of weights and pools together.
    """

    def fits(pages: int) -> bool:
        plan = budget(load, weights, pages)
        held = plan.weights + plan.draft + plan.pools
        return plan.total <= available and (static is None or held <= static)

    low, high = 0, max(available, 0) // load.pool.full_page + 1
    while low < high:  # every line of the table grows with the pages
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def useful_pages(load: Load) -> int:
    """Pages beyond which a pool would only keep prefixes that hardly anybody comes back to."""
    return -(-KEPT_CONTEXTS * load.requests * load.context // PAGE_TOKENS)


class Card(NamedTuple):
    """What a server may take of each card, and what its owner said about it."""

    free: int  # bytes before the server starts
    static_share: float | None = None  # of `free`, for weights and pools (--mem-fraction-static)
    context: int = CONTEXT_LEAST  # bytes that CUDA takes

    @property
    def available(self) -> int:
        return self.free - self.context

    @property
    def cautious(self) -> "Card":
        """The card by which sizes are chosen, where those that are given may go further."""
        return self._replace(context=CONTEXT_MOST + FRAGMENTS)

    @property
    def static(self) -> int | None:
        return None if self.static_share is None else int(self.static_share * self.free)

    def tokens(self, load: Load, weights: Weights) -> int:
        """Tokens of the largest pool."""
        return PAGE_TOKENS * most_pages(load, weights, self.available, self.static)


class Wishes(NamedTuple):
    """What the user gave; None is for the budget to choose."""

    requests: int | None = None
    context: int | None = None
    prompt_rows: int | None = None
    tokens: int | None = None


class Plan(NamedTuple):
    load: Load
    tokens: int  # of the full pool


def plan(card: Card, weights: Weights, load: Load, wishes: Wishes) -> Plan:
    """Choose what was not given: the chunk, then up to 8 requests, then context, then requests.

    load: config, tp, verify_width, window_ratio and graphs of the server; the rest is chosen.

    Raises:
        BudgetError: what was given cannot be held, or the model itself cannot.
    """
    longest = load.config.max_position_embeddings
    least = load._replace(
        requests=wishes.requests or 1,
        context=wishes.context or min(wishes.tokens or MIN_TOKENS, longest),
        prompt_rows=wishes.prompt_rows or CHUNKS[-1],
    )
    wanted = wishes.tokens or wishes.context or MIN_TOKENS
    if card.tokens(least, weights) < wanted:
        raise BudgetError(cannot_hold(card, weights, least, wishes, wanted))
    card = card.cautious
    chosen = _with_chunk(card, weights, least, wishes, wanted)
    for requests in _request_counts(wishes):
        load = _with_context(card, weights, chosen._replace(requests=requests), wishes)
        tokens = wishes.tokens or card.tokens(load, weights)
        if card.tokens(load, weights) >= wanted and tokens >= min(
            requests * TOKENS_PER_REQUEST, requests * longest, wishes.tokens or tokens
        ):
            break
    else:
        load = _with_context(card, weights, chosen, wishes)
        tokens = wishes.tokens or max(card.tokens(load, weights), wanted)
    return Plan(*_with_more_requests(card, weights, load, wishes, tokens))


def _request_counts(wishes: Wishes) -> Iterator[int]:
    """Requests to try, the preferred first."""
    if wishes.requests is not None:
        yield wishes.requests
    else:
        yield from range(PREFERRED_REQUESTS, 0, -1)


def _with_chunk(card: Card, weights: Weights, load: Load, wishes: Wishes, wanted: int) -> Load:
    """The largest chunk whose workspace is a sixth of the room beside the weights, or less."""
    if wishes.prompt_rows is not None:
        return load
    room = card.available - weights.target - weights.draft
    for rows in CHUNKS:
        wide = load._replace(prompt_rows=rows, context=max(load.context, rows))
        if prompt_workspace(wide, 0) <= room // 6 and card.tokens(wide, weights) >= wanted:
            return load._replace(prompt_rows=rows)
    return load


def _with_context(card: Card, weights: Weights, load: Load, wishes: Wishes) -> Load:
    """The longest context that the pool can hold; it costs rope tables and workspace itself."""
    if wishes.context is not None:
        return load
    longest = load.config.max_position_embeddings
    if wishes.tokens is not None:
        longest = min(longest, wishes.tokens)
    low, high = 0, longest // CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        context = middle * CONTEXT_STEP
        fits = card.tokens(load._replace(context=context), weights) >= context
        low, high = (middle, high) if fits else (low, middle - 1)
    context = longest if low == longest // CONTEXT_STEP else low * CONTEXT_STEP
    return load._replace(context=max(context, min(MIN_TOKENS, longest)))


def _with_more_requests(
    card: Card, weights: Weights, load: Load, wishes: Wishes, tokens: int
) -> tuple[Load, int]:
    """More than the preferred requests where the context is whole without them."""
    if wishes.requests is not None or load.requests < PREFERRED_REQUESTS:
        return load, tokens
    longest = load.config.max_position_embeddings
    for requests in range(MOST_REQUESTS, PREFERRED_REQUESTS, -8):
        more = load._replace(requests=requests)
        found = card.tokens(more, weights)
        enough = max(longest, requests * min(TOKENS_PER_REQUEST, longest))
        if load.context == (wishes.context or longest) and found >= (wishes.tokens or enough):
            return more, wishes.tokens or found
    return load, tokens


def cannot_hold(card: Card, weights: Weights, load: Load, wishes: Wishes, wanted: int) -> str:
    """One sentence: what does not fit, what it needs, and what would fit."""
    needed = budget(load, weights, -(-wanted // PAGE_TOKENS))
    said = given(wishes)
    head = (
        f"{said or 'This model'} needs {gib(needed.total + card.context)} on each card (weights "
        f"{gib(needed.weights)}, draft {gib(needed.draft)}, pools {gib(needed.pools)}, workspace "
        f"{gib(needed.workspace)}, the rest {gib(_rest(needed) + card.context)})"
    )
    has = f"{gib(card.free)} {'are' if card.free != GIB else 'is'} free"
    if card.static is not None and needed.weights + needed.draft + needed.pools > card.static:
        has += f", of which --mem-fraction-static {card.static_share} gives {gib(card.static)} to "
        has += "weights and pools"
    # What is proposed must fit for certain.
    fitting = list(_what_would_fit(card.cautious, weights, load, wishes, wanted))
    if not fitting:
        return f"{head}, but {has}; free memory or divide the model by more cards (--tp-size)."
    return f"{head}, but {has}; {' or '.join(fitting)} would fit."


def _rest(needed: Budget) -> int:
    return needed.rope + needed.graphs + needed.tables + needed.reserve


def given(wishes: Wishes) -> str:
    flags = {
        "--max-running-requests": wishes.requests,
        "--context-length": wishes.context,
        "--max-total-tokens": wishes.tokens,
    }
    return " ".join(f"{name} {value}" for name, value in flags.items() if value is not None)


def _what_would_fit(
    card: Card, weights: Weights, load: Load, wishes: Wishes, wanted: int
) -> Iterator[str]:
    """Changes of one flag each that make room, in words."""
    if wishes.requests is not None:
        fewer = _largest(
            load.requests - 1,
            lambda n: card.tokens(load._replace(requests=n), weights) >= wanted,
        )
        if fewer:
            yield f"--max-running-requests {fewer}"
    if wishes.tokens is not None:
        tokens = card.tokens(load, weights)
        if tokens >= MIN_TOKENS:
            yield f"--max-total-tokens {tokens}"
    elif wishes.context is not None:
        steps = _largest(
            load.context // CONTEXT_STEP,
            lambda n: (
                card.tokens(load._replace(context=n * CONTEXT_STEP), weights) >= n * CONTEXT_STEP
            ),
        )
        if steps:
            yield f"--context-length {steps * CONTEXT_STEP}"
    if load.prompt_rows > CHUNKS[-1]:
        rows = next(
            (
                rows
                for rows in CHUNKS
                if rows < load.prompt_rows
                and card.tokens(load._replace(prompt_rows=rows), weights) >= wanted
            ),
            None,
        )
        if rows:
            yield f"--chunked-prefill-size {rows}"


def _largest(most: int, holds) -> int:
    """Largest 1 <= n <= most with holds(n), which is true below some n; 0 if there is none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"


def what_gives_more(load: Load, weights: Weights, available: int, static: int | None) -> list[str]:
    """Changes that enlarge the pool, each with the tokens it would then hold."""
    smaller = {}
    if load.requests > 1:
        requests = load.requests // 2
        smaller[f"--max-running-requests {requests}"] = load._replace(requests=requests)
    if load.context > 2 * MIN_TOKENS:
        context = load.context // 2
        smaller[f"--context-length {context}"] = load._replace(context=context)
    if load.prompt_rows > CHUNKS[-1]:
        rows = next(rows for rows in CHUNKS if rows < load.prompt_rows)
        smaller[f"--chunked-prefill-size {rows}"] = load._replace(prompt_rows=rows)
    return [
        f"{change}: {PAGE_TOKENS * most_pages(other, weights, available, static):,} tokens"
        for change, other in smaller.items()
    ]


def table(plan: Budget, load: Load, more: list[str]) -> str:
    """The budget as lines of text."""
    lines = [f"  {name:<10}{size / MIB:>10,.1f} MiB" for name, size in plan._asdict().items()
             if name != "tokens"]  # fmt: skip
    return "\n".join(
        (
            f"Memory of each card: {plan.tokens:,} tokens, {load.requests} requests, "
            f"context {load.context:,}, prompts in up to {load.prompt_rows:,} rows",
            *lines,
            f"  {'all':<10}{plan.total / MIB:>10,.1f} MiB",
            *(f"  more with {change}" for change in more),
        )
    )
