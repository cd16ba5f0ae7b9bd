"""Seams: what SGLang would run as Triton or as CUDA streams on a machine without a GPU."""

from dspark.host.seam import Seam, Use

SEAMS = (
    Seam("utils.common.support_triton", Use.HOOK, ("backend",)),
    Seam(
        "mem_cache.allocation.get_last_loc",
        Use.HOOK,
        ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
    ),
    Seam(
        "mem_cache.allocation.get_last_loc_torch",
        Use.CALL,
        ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
    ),
    Seam("managers.overlap_utils.FutureMap._resolve_spec_extras", Use.HOOK, ("self", "batch")),
    Seam(
        "constrained.xgrammar_backend._allocate_token_bitmask",
        Use.HOOK,
        ("vocab_size", "batch_size"),
    ),
    Seam(
        "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
        Use.HOOK,
        ("self", "logits", "vocab_mask"),
    ),
    Seam(
        "configs.update_config.adjust_config_with_unaligned_cpu_tp",
        Use.HOOK,
        ("model_config", "load_config", "tp_size"),
    ),
)
