"""KV and state memory of DeepSeek-V4 inside SGLang, and how much of it a machine can hold.

The full pool holds what a request keeps for life: compressed entries (1/4 and 1/128 of a token
a layer) and indexer keys. The window pool holds the latents of the last 128 tokens and the C4
rings, and its pages return as the window slides. C128 rings belong to request slots.
"""

from typing import NamedTuple

import torch
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig, MemoryPoolConfigurator

from dspark.kernels.indexer.pages import PACKED_STRIDE
from dspark.kernels.qkv.pages import page_stride
from dspark.state import StateGeometry, StateLifecycle
from dspark.target.caches import C4_PER_PAGE, C128_PER_PAGE, PAGE_TOKENS, LayerCaches
from dspark.target.config import ModelConfig


def layers_of(config: ModelConfig, ratio: int) -> list[int]:
    """Layer indices of one kind, ascending: their order in the state rings."""
    return [i for i, r in enumerate(config.compress_ratios) if r == ratio]


def state_geometry(
    config: ModelConfig, slots: int, window_pages: int, verify_rows: int
) -> StateGeometry:
    """Rings for `slots` requests and `window_pages` pages; `verify_rows` is 1 without drafts."""
    return StateGeometry.for_model(
        slots=slots,
        swa_pages=window_pages,
        verify_rows=verify_rows,
        c4_layers=len(layers_of(config, 4)),
        c128_layers=len(layers_of(config, 128)),
    )


def _pool(pages: int, stride: int, device) -> torch.Tensor:
    """[pages + 1, stride] bytes; page 0 absorbs nothing and is never read, but SGLang owns it."""
    return torch.zeros(pages + 1, stride, dtype=torch.uint8, device=device)


class WindowPool(BaseSWAKVPool):
    """Window latents of `layers` layers; the draft runner needs nothing else."""

    def __init__(self, size: int, window_size: int, layers: int, dtype, device: str):
        super().__init__(size, PAGE_TOKENS, dtype, layers, device, False)
        # Registered by SGLang when it builds the allocator, before any forward.
        self.full_to_swa_index_mapping: torch.Tensor = None  # type: ignore[assignment]
        self.window = [
            _pool(window_size // PAGE_TOKENS, page_stride(PAGE_TOKENS), device)
            for _ in range(layers)
        ]
        self.layer_caches = [LayerCaches(window=w) for w in self.window]
        self.swa_kv_pool = self

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        return self.full_to_swa_index_mapping[kv_indices]

    def get_state_buf_infos(self):
        return [], [], []  # only read by disaggregated serving, which is refused at start

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.window[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.window[layer_id]  # one latent is key and value

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.window[layer_id], self.window[layer_id]

    def set_kv_buffer(self, layer, loc, cache_k, cache_v) -> None:
        raise NotImplementedError("V4 latents are stored by dspark.kernels.qkv")

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """(bytes of all pools, 0): keys and values are the same memory."""
        return sum(t.nbytes for c in self.layer_caches for t in c if t is not None), 0


class DSparkKVPool(WindowPool):
    """Everything the target model keeps: window, compressed entries, indexer keys and rings."""

    def __init__(
        self,
        config: ModelConfig,
        size: int,
        window_size: int,
        slots: int,
        verify_rows: int,
        dtype,
        device: str,
    ):
        super().__init__(size, window_size, config.num_hidden_layers, dtype, device)
        pages = size // PAGE_TOKENS
        geometry = state_geometry(config, slots, window_size // PAGE_TOKENS, verify_rows)
        self.state = StateLifecycle(geometry, device)
        c4, c128 = layers_of(config, 4), layers_of(config, 128)
        for i, layer in enumerate(c4):
            self.layer_caches[layer] = LayerCaches(
                window=self.window[layer],
                compressed=_pool(pages, page_stride(C4_PER_PAGE), device),
                index=_pool(pages, PACKED_STRIDE, device),
                state=self.state.pools.layer("c4", i),
                index_state=self.state.pools.layer("idx", i),
            )
        for i, layer in enumerate(c128):
            self.layer_caches[layer] = LayerCaches(
                window=self.window[layer],
                compressed=_pool(pages, page_stride(C128_PER_PAGE), device),
                state=self.state.pools.layer("c128", i),
            )


def build_kv_pool(configurator, *, sizes, req_to_token_pool) -> WindowPool:
    """The pool of the target runner, or of a draft runner (window latents only).

    Args:
        configurator: SGLang's KVCacheConfigurator.
        sizes: its resolved pool sizes, in tokens.
    """
    size, window = sizes.full_max_total_num_tokens, sizes.swa_max_total_num_tokens
    if configurator.is_draft_worker:
        stages = configurator.layer_info.num_effective_layers
        return WindowPool(size, window, stages, configurator.kv_cache_dtype, configurator.device)
    config = ModelConfig.from_hf(configurator.model_config.hf_config)
    args = configurator.server_args
    pool = DSparkKVPool(
        config,
        size,
        window,
        slots=req_to_token_pool.req_to_token.shape[0] - 1,
        verify_rows=args.speculative_num_draft_tokens or 1,
        dtype=configurator.kv_cache_dtype,
        device=configurator.device,
    )
    pool.state.slots.attach_pool(req_to_token_pool)
    return pool


class PoolBytes(NamedTuple):
    full_page: int  # entries and indexer keys of 256 tokens, all layers
    window_page: int  # latents and C4 rows of 256 tokens, all layers and draft stages
    slot: int  # C128 rings of one request


def pool_bytes(config: ModelConfig, stages: int, verify_rows: int) -> PoolBytes:
    c4, c128 = len(layers_of(config, 4)), len(layers_of(config, 128))
    one = state_geometry(config, 1, 1, verify_rows).nbytes()  # two owners: padding and one more
    return PoolBytes(
        full_page=c4 * (page_stride(C4_PER_PAGE) + PACKED_STRIDE)
        + c128 * page_stride(C128_PER_PAGE),
        window_page=(config.num_hidden_layers + stages) * page_stride(PAGE_TOKENS)
        + (one["c4"] + one["idx"]) // 2,
        slot=one["c128"] // 2,
    )


class DSparkPoolConfigurator(MemoryPoolConfigurator):
    """Splits memory between the full and the window pool.

    The window pool gets what the running requests and one prefill chunk need, or
    `--swa-full-tokens-ratio` of the full pool where that is more (a larger window pool keeps more
    prefixes reusable); never more than the full pool.
    """

    def __init__(self, kvc):
        args = kvc.server_args
        config = ModelConfig.from_hf(kvc.model_config.hf_config)
        verify_rows = args.speculative_num_draft_tokens or 1
        stages = config.dspark.stages if verify_rows > 1 and config.dspark else 0
        self.bytes = pool_bytes(config, stages, verify_rows)
        self.slots = args.max_running_requests or 1
        self.ratio = args.swa_full_tokens_ratio
        # Window, the pages that straddle its two ends, and the slots a verify reserves ahead.
        self.needed_pages = 4 * self.slots + (args.chunked_prefill_size or 0) // PAGE_TOKENS + 1

    def window_pages(self, full_pages: int) -> int:
        return min(full_pages, max(self.needed_pages, int(full_pages * self.ratio)))

    def total_bytes(self, full_pages: int) -> int:
        """Memory of all pools, the reserved page and slot included."""
        return (
            (full_pages + 1) * self.bytes.full_page
            + (self.window_pages(full_pages) + 1) * self.bytes.window_page
            + (self.slots + 1) * self.bytes.slot
        )

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        low, high = 0, max(available_bytes // self.bytes.full_page, 1)
        while low < high:  # the largest page count that fits; total_bytes is monotone
            middle = (low + high + 1) // 2
            if self.total_bytes(middle) <= available_bytes:
                low = middle
            else:
                high = middle - 1
        return self.calculate_pool_sizes_from_max_tokens(low * PAGE_TOKENS, page_size)

    def calculate_pool_sizes_from_max_tokens(
        self, max_total_num_tokens: int, page_size: int
    ) -> MemoryPoolConfig:
        pages = max_total_num_tokens // PAGE_TOKENS
        return MemoryPoolConfig(
            max_total_num_tokens=pages * PAGE_TOKENS,
            full_max_total_num_tokens=pages * PAGE_TOKENS,
            swa_max_total_num_tokens=self.window_pages(pages) * PAGE_TOKENS,
        )
