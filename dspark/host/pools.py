"""KV and state memory of DeepSeek-V4 inside SGLang (sizes: `dspark.host.pool_sizes`)."""

import torch
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig

from dspark.host import memory_report
from dspark.host.memory_budget import GIB
from dspark.host.pool_sizes import layers_of, state_geometry
from dspark.kernels.common.index_pages import PACKED_STRIDE
from dspark.kernels.common.kv_pages import page_stride
from dspark.state import StateLifecycle
from dspark.target.caches import C4_PER_PAGE, C128_PER_PAGE, PAGE_TOKENS, LayerCaches
from dspark.target.config import ModelConfig


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
        verify_width: int,
        dtype,
        device: str,
    ):
        super().__init__(size, window_size, config.num_hidden_layers, dtype, device)
        pages = size // PAGE_TOKENS
        geometry = state_geometry(config, slots, window_size // PAGE_TOKENS, verify_width)
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
        # GiB, for SGLang's `/server_info`, load report and metrics.
        self.mem_usage = sum(self.get_kv_size_bytes()) / GIB


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
        verify_width=args.speculative_num_draft_tokens or 1,
        dtype=configurator.kv_cache_dtype,
        device=configurator.device,
    )
    req_to_token_pool.report_to(pool.state.slots)
    return pool


def resolve_pool_config(configurator, pre_model_load_memory: float) -> MemoryPoolConfig:
    """Sizes of the pools, for SGLang; the budget they follow from is kept for `build_kv_pool`.

    Args:
        configurator: SGLang's KVCacheConfigurator of the target runner; weights are loaded.
        pre_model_load_memory: free GiB before that; not needed, the budget counts in bytes.

    Raises:
        UsageError: the pools that the flags ask for do not fit.
    """
    made = memory_report.measure(configurator)
    pages = made.budget.tokens // PAGE_TOKENS
    configurator.model.memory_report = made
    return MemoryPoolConfig(
        max_total_num_tokens=made.budget.tokens,
        max_running_requests=made.load.requests,
        full_max_total_num_tokens=made.budget.tokens,
        swa_max_total_num_tokens=made.load.window_pages(pages) * PAGE_TOKENS,
        mem_fraction_static=configurator.server_args.mem_fraction_static,
    )
