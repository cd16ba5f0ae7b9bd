"""SGLang's own allocator, host pool group and controller around the product's pools, on the CPU."""

import importlib
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from dspark.state import PageHostPool

PAGE = 256
LAYERS = (0, 4, 128)  # compress ratio of each layer
HOST_PAGES = 6


class Stack(NamedTuple):
    pool: Any  # DSparkKVPool
    allocator: Any  # DSparkAllocator
    controller: Any  # HybridCacheController
    names: Any  # SGLang's PoolName
    transfer: Any  # SGLang's PoolTransfer

    @property
    def state(self):
        return self.pool.state


def build(pages: int = 8) -> Stack:
    """3 layers: window only, C4, C128. `pages` full pages and as many window pages."""
    allocators = importlib.import_module("dspark.host.allocator")
    pools = importlib.import_module("dspark.host.pools")
    host = importlib.import_module("sglang.srt.mem_cache.memory_pool_host")
    storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    controllers = importlib.import_module(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
    )

    config = SimpleNamespace(num_hidden_layers=len(LAYERS), compress_ratios=LAYERS)
    size = pages * PAGE
    pool = pools.DSparkKVPool(config, size, size, 4, 6, torch.uint8, "cpu")
    allocator = allocators.DSparkAllocator(size, size, PAGE, torch.uint8, "cpu", pool, False)
    names = storage.PoolName
    window = allocator.swa_attn_allocator
    caches, rings = pool.layer_caches, pool.state.pools

    def entry(name, host_pool, layers, **rest):
        order = {layer: i for i, layer in enumerate(layers)}
        return host.PoolEntry(
            name=name, host_pool=host_pool, device_pool=pool, layer_mapper=order.get, **rest
        )

    def mirror(views):
        return PageHostPool(views, HOST_PAGES, PAGE)

    group = host.HostPoolGroup(
        [
            entry(
                names.KV,
                host.LogicalHostPool(HOST_PAGES * PAGE, PAGE),
                range(3),
                is_primary_index_anchor=True,
            ),
            entry(
                names.SWA,
                mirror(pool.window),
                range(3),
                device_alloc_fn=window.alloc,
                device_free_fn=window.free,
            ),
            entry(names.DEEPSEEK_V4_C4, mirror([caches[1].compressed]), [1]),
            entry(names.DEEPSEEK_V4_C4_INDEXER, mirror([caches[1].index]), [1]),
            entry(names.DEEPSEEK_V4_C128, mirror([caches[2].compressed]), [2]),
            entry(names.DEEPSEEK_V4_C4_STATE, mirror([rings.page_view("c4", 0)]), [1]),
            entry(names.DEEPSEEK_V4_C4_INDEXER_STATE, mirror([rings.page_view("idx", 0)]), [1]),
        ]
    )
    controller = controllers.HybridCacheController(
        allocator,
        group,
        PAGE,
        None,
        threading.Event(),
        write_policy="write_through",
        io_backend="direct",
        transfer_layer_num=len(LAYERS),
    )
    return Stack(pool, allocator, controller, names, storage.PoolTransfer)


def transfers(stack: Stack, *, without: tuple[str, ...] = (), **window_indices) -> list:
    """PoolTransfers of one page bundle; window_indices: device_indices= or host_indices=."""
    names, transfer = stack.names, stack.transfer
    bundle = [transfer(name=names.SWA, **window_indices)]
    for name, source in (
        (names.DEEPSEEK_V4_C4, names.KV),
        (names.DEEPSEEK_V4_C4_INDEXER, names.KV),
        (names.DEEPSEEK_V4_C128, names.KV),
        (names.DEEPSEEK_V4_C4_STATE, names.SWA),
        (names.DEEPSEEK_V4_C4_INDEXER_STATE, names.SWA),
    ):
        if name not in without:
            bundle.append(transfer(name=name, indices_from_pool=source))
    return bundle
