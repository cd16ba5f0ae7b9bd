"""Seams: helpers that hooks of several kinds lean on, and the plugin interface itself."""

from dspark.host.seam import Seam, Use

SEAMS = (
    Seam("utils.get_device", Use.CALL),
    Seam("utils.get_available_gpu_memory", Use.CALL, ("device", "gpu_id")),
    Seam("distributed.get_world_group", Use.CALL),
    Seam("entrypoints.warmup.warmup", Use.CALL, ("name",)),
    Seam("managers.io_struct.GenerateReqInput", Use.CALL, ("input_ids", "sampling_params")),
    Seam("managers.io_struct.SetInternalStateReq", Use.CALL, ("server_args",)),
    Seam("utils.is_cpu", Use.CALL),
    Seam("utils.get_num_new_pages", Use.CALL, ("seq_lens", "page_size", "prefix_lens", "decode")),
    Seam("utils.kill_process_tree", Use.CALL, ("parent_pid", "include_parent", "wait_timeout")),
    Seam("runtime_context.get_exec", Use.CALL),
    Seam("runtime_context.get_server_args", Use.CALL),
    Seam("runtime_context.get_schedule", Use.CALL),
    Seam("runtime_context.get_spec", Use.CALL),
    Seam("model_executor.forward_batch_info.ForwardMode.is_target_verify", Use.CALL),
    Seam("model_executor.forward_batch_info.CaptureHiddenMode.FULL", Use.CALL),
    Seam(
        "model_executor.forward_batch_info.ForwardBatch",
        Use.CALL,
        (
            "forward_mode",
            "batch_size",
            "input_ids",
            "req_pool_indices",
            "seq_lens",
            "out_cache_loc",
            "seq_lens_sum",
            "seq_lens_cpu",
            "positions",
            "spec_algorithm",
            "spec_info",
            "capture_hidden_mode",
        ),
    ),
    Seam(
        "layers.logits_processor.LogitsProcessorOutput",
        Use.CALL,
        ("next_token_logits", "hidden_states"),
    ),
    Seam("layers.sampler.SGLANG_RETURN_ORIGINAL_LOGPROB", Use.CALL),
    Seam(
        "speculative.draft_worker_common.make_draft_block_spec_info",
        Use.CALL,
        ("draft_token_num", "device"),
    ),
    Seam("plugins.hook_registry.HookType.AROUND", Use.CALL),
    Seam("managers.schedule_batch.FINISH_ABORT", Use.CALL, ("message", "status_code", "err_type")),
    Seam("plugins.load_plugins", Use.CALL),
    Seam(
        "plugins.hook_registry.HookRegistry.register",
        Use.CALL,
        ("target", "hook", "hook_type"),
    ),
    Seam("plugins.hook_registry.HookRegistry._patched", Use.TABLE),
)
