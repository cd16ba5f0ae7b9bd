"""Hooks for machines without a GPU: what SGLang would run as Triton, streams or pinned memory.

Each takes SGLang's function first and calls it wherever the device or the model is not ours.
"""

from dspark.host import arguments, seams


def allow_dspark_on_cpu(original, server_args):
    """_handle_dspark refuses every device but CUDA; its other checks hold on the CPU too."""
    if server_args.device != "cpu" or not arguments.is_deepseek_v4(server_args):
        return original(server_args)
    server_args.device = "cuda"
    try:
        return original(server_args)
    finally:
        server_args.device = "cpu"


def without_triton_on_cpu(original, backend):
    from sglang.srt.utils import is_cpu

    return False if is_cpu() and backend == seams.ATTENTION_BACKEND else original(backend)


def last_slot_in_torch(original, req_to_token, req_pool_indices_tensor, prefix_lens_tensor):
    from sglang.srt.mem_cache.allocation import get_last_loc_torch
    from sglang.srt.runtime_context import get_exec

    ours = get_exec().kernel.attention_backend == seams.ATTENTION_BACKEND
    choose = get_last_loc_torch if ours and req_to_token.device.type == "cpu" else original
    return choose(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


def bonus_tokens_without_stream(original, future_map, batch):
    """The stock code records a CUDA stream on the index tensor; a CPU tensor has none."""
    draft = batch.spec_info
    if not future_map.spec_algo.is_dspark() or str(future_map.device) != "cpu" or draft is None:
        return original(future_map, batch)
    if draft.future_indices.shape[0]:
        draft.bonus_tokens = future_map.output_tokens_buf[draft.future_indices]
    return None


def mask_without_pinned_memory(original, vocab_size, batch_size):
    """SGLang allocates grammar masks in pinned memory, which needs an accelerator."""
    from sglang.srt.utils import is_cpu

    if not is_cpu():
        return original(vocab_size, batch_size)
    import torch
    from xgrammar import bitmask_dtype, get_bitmask_shape

    return torch.full(get_bitmask_shape(batch_size, vocab_size), -1, dtype=bitmask_dtype)


def mask_logits_on_cpu(original, grammar, logits, vocab_mask):
    """SGLang masks on accelerators only; xgrammar brings the loop for the CPU."""
    if logits.device.type != "cpu":
        return original(grammar, logits, vocab_mask)
    from xgrammar import apply_token_bitmask_inplace

    return apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")


def keep_head_counts(original, model_config, load_config, tp_size):
    """SGLang pads head counts for its AMX kernels on the CPU; our weights would no longer fit."""
    from sglang.srt.configs.model_config import is_deepseek_v4

    if is_deepseek_v4(model_config.hf_config):
        return model_config
    return original(model_config, load_config, tp_size)
