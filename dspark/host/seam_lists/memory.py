"""Seams: memory (worker process)."""

from dspark.host.seam import KVC, PAGED_ALLOCATOR, REQUEST_POOL, SWA_ALLOCATOR, Seam, Use

SEAMS = (
    Seam(
        f"{KVC}._build_default_req_pool",
        Use.HOOK,
        ("self", "max_num_reqs", "extra_max_context_len"),
    ),
    Seam(
        REQUEST_POOL,
        Use.BASE,
        ("size", "max_context_len", "device", "enable_memory_saver"),
    ),
    Seam(f"{REQUEST_POOL}.alloc", Use.BASE, ("reqs",)),
    Seam(f"{REQUEST_POOL}.free", Use.BASE, ("req",)),
    Seam(f"{REQUEST_POOL}.clear", Use.BASE),
    Seam(
        f"{KVC}._build_token_to_kv_pool",
        Use.HOOK,
        ("self", "sizes", "is_dsa_model", "is_dsv4_model", "req_to_token_pool"),
    ),
    Seam(
        f"{KVC}._build_token_to_kv_pool_allocator",
        Use.HOOK,
        (
            "self",
            "sizes",
            "token_to_kv_pool",
            "is_dsv4_model",
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
        ),
    ),
    Seam(f"{KVC}._resolve_memory_pool_config", Use.HOOK, ("self", "pre_model_load_memory")),
    Seam(
        "model_executor.pool_configurator.MemoryPoolConfig",
        Use.CALL,
        (
            "max_total_num_tokens",
            "max_running_requests",
            "full_max_total_num_tokens",
            "swa_max_total_num_tokens",
            "mem_fraction_static",
        ),
    ),
    Seam("mem_cache.base_swa_memory_pool.BaseSWAKVPool.register_mapping", Use.BASE),
    Seam(
        "mem_cache.memory_pool.KVCache",
        Use.BASE,
        ("size", "page_size", "dtype", "layer_num", "device", "enable_memory_saver"),
    ),
    Seam(
        SWA_ALLOCATOR,
        Use.BASE,
        ("size", "size_swa", "page_size", "dtype", "device", "kvcache", "need_sort"),
    ),
    Seam(f"{SWA_ALLOCATOR}.free", Use.BASE, ("free_index",)),
    Seam(f"{SWA_ALLOCATOR}.free_group_end", Use.BASE),
    Seam(f"{SWA_ALLOCATOR}._expand_to_full_pages", Use.CALL),
    Seam(
        PAGED_ALLOCATOR, Use.BASE, ("size", "page_size", "dtype", "device", "kvcache", "need_sort")
    ),
    Seam(
        f"{PAGED_ALLOCATOR}.alloc_extend",
        Use.BASE,
        (
            "prefix_lens",
            "prefix_lens_cpu",
            "seq_lens",
            "seq_lens_cpu",
            "last_loc",
            "extend_num_tokens",
        ),
    ),
    Seam(f"{PAGED_ALLOCATOR}.alloc_decode", Use.BASE, ("seq_lens", "seq_lens_cpu", "last_loc")),
    Seam(f"{PAGED_ALLOCATOR}._release_page_ids", Use.BASE, ("page_ids",)),
    Seam(f"{PAGED_ALLOCATOR}.clear", Use.BASE),
)
