"""The target model without a server: a few sequences with fixed page tables.

The oracle tests and the evaluation scripts drive the model through this; serving goes through
SGLang's scheduler and pools instead (`dspark.host.backend`, `dspark.host.pools`).
"""

from typing import NamedTuple

import torch

from dspark.kernels.common.index_pages import KEYS, PACKED_STRIDE, WIDTH
from dspark.kernels.common.kv_pages import page_stride
from dspark.kernels.compress import rows_fit_ring
from dspark.kernels.step import BatchRows, Bounds, Rings, StepMeta, Tables, step_meta
from dspark.state import StateGeometry, StatePools
from dspark.target.attention import Forward
from dspark.target.caches import C4_PER_PAGE, C128_PER_PAGE, PAGE_TOKENS, LayerCaches
from dspark.target.config import ModelConfig
from dspark.target.model import TargetOutput, logits, run_layers
from dspark.target.rope import rope_tables
from dspark.target.weights import TargetWeights


class Rows(NamedTuple):
    """Tokens of one sequence to run in a forward, at positions prefix, prefix + 1, ..."""

    sequence: int
    prefix: int
    tokens: list[int]


def local_caches(
    config: ModelConfig,
    geometry: StateGeometry,
    pools: StatePools,
    pages: int,
    oracle: bool,
    device: torch.device,
) -> list[LayerCaches]:
    """Pools of `pages` pages a layer: packed bytes as served, or plain fp32 for the oracle."""

    def pages_of(packed: int, plain: int) -> torch.Tensor:
        if oracle:
            return torch.full((pages, plain), float("nan"), device=device)
        return torch.full((pages, packed), 255, dtype=torch.uint8, device=device)

    def pool(entries: int) -> torch.Tensor:
        return pages_of(page_stride(entries), entries * 512)

    def index_pool() -> torch.Tensor:
        return pages_of(PACKED_STRIDE, KEYS * WIDTH)

    caches, seen = [], {4: 0, 128: 0}
    for ratio in config.compress_ratios:
        if ratio == 0:
            caches.append(LayerCaches(window=pool(PAGE_TOKENS)))
            continue
        i = seen[ratio]
        seen[ratio] += 1
        caches.append(
            LayerCaches(
                window=pool(PAGE_TOKENS),
                compressed=pool(C4_PER_PAGE if ratio == 4 else C128_PER_PAGE),
                index=index_pool() if ratio == 4 else None,
                state=pools.layer("c4" if ratio == 4 else "c128", i),
                index_state=pools.layer("idx", i) if ratio == 4 else None,
            )
        )
    return caches


class LocalTarget:
    """A target model, its memory, and fixed slots for `sequences` sequences.

    Args:
        weights: as loaded for one rank.
        max_tokens: longest sequence, rounded up to whole pages.
        verify_width: widest forward that may be rolled back (1 without speculation).
        dtype: bf16 runs in served precision, fp32 is the unquantised oracle.
        capture_layers: layers whose outputs `forward` returns as captures.
        device: where `weights` are.

    Pools start filled with NaN (or its byte pattern), so a read before a write shows.
    """

    def __init__(
        self,
        weights: TargetWeights,
        config: ModelConfig,
        *,
        max_tokens: int,
        sequences: int = 1,
        verify_width: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        capture_layers: frozenset[int] = frozenset(),
        device: torch.device | str = "cpu",
    ):
        self.weights, self.config, self.dtype = weights, config, dtype
        self.device = torch.device(device)
        self.capture_layers = capture_layers
        pages_each = -(-max_tokens // PAGE_TOKENS)
        pages = 1 + sequences * pages_each  # page 0 stays reserved, as in the server
        kinds = list(config.compress_ratios)
        self.geometry = StateGeometry.for_model(
            slots=sequences,
            window_pages=pages - 1,
            verify_width=verify_width,
            c4_layers=kinds.count(4),
            c128_layers=kinds.count(128),
        )
        self.state = StatePools(self.geometry, self.device)
        self.caches = local_caches(
            config, self.geometry, self.state, pages, dtype == torch.float32, self.device
        )
        self.max_pages = pages_each
        table = torch.zeros(sequences + 1, pages_each * PAGE_TOKENS, dtype=torch.int32)
        for i in range(sequences):
            first = (1 + i * pages_each) * PAGE_TOKENS
            table[i + 1] = torch.arange(first, first + pages_each * PAGE_TOKENS)
        self.tables = Tables(
            table.to(self.device), torch.arange(pages * PAGE_TOKENS, device=self.device)
        )
        self.rope = rope_tables(config, pages_each * PAGE_TOKENS, self.device)

    def tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=self.device)

    def meta(self, rows: list[Rows], store_all: bool) -> StepMeta:
        return step_meta(
            BatchRows(
                self.tensor([r.sequence + 1 for r in rows]),
                self.tensor([r.prefix for r in rows]),
                self.tensor([len(r.tokens) for r in rows]),
                sum(len(r.tokens) for r in rows),
            ),
            self.tables,
            Bounds(self.config.sliding_window, self.max_pages, self.max_pages * C128_PER_PAGE),
            Rings(self.geometry.c4.ring, self.geometry.c128.ring),
            store_all=store_all,
        )

    @torch.no_grad()
    def forward(self, rows: list[Rows], store_all: bool = True) -> TargetOutput:
        """Run all rows in one forward; `store_all` as in decode and verify, False as in prefill."""
        ids = self.tensor([t for r in rows for t in r.tokens])
        running = rows_fit_ring(max(len(r.tokens) for r in rows), self.geometry.c4.ring)
        return run_layers(
            self.weights.embed[ids].to(self.dtype),
            ids,
            self.weights,
            self.config,
            Forward(self.meta(rows, store_all), running, self.rope, self.caches),
            self.capture_layers,
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> f32 [T, vocab]."""
        return logits(hidden, self.weights)

    def greedy(self, prompt: list[int], new_tokens: int, sequence: int = 0) -> list[int]:
        """Prefill `prompt`, then decode `new_tokens` tokens one at a time."""
        out = self.forward([Rows(sequence, 0, prompt)], store_all=False)
        produced = [int(self.logits(out.hidden[-1:]).argmax())]
        while len(produced) < new_tokens:
            prefix = len(prompt) + len(produced) - 1
            out = self.forward([Rows(sequence, prefix, produced[-1:])])
            produced.append(int(self.logits(out.hidden).argmax()))
        return produced
