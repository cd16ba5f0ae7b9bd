"""Seams: speculative decoding (worker process)."""

from dspark.host.seam import DRAFT_INPUT, SAMPLER, SPEC_WORKER, Seam, Use

SEAMS = (
    Seam(
        "speculative.spec_info.SpeculativeAlgorithm.create_worker",
        Use.HOOK,
        ("self", "server_args"),
    ),
    Seam(
        "speculative.spec_info.SpeculativeAlgorithm.get_num_tokens_per_req_for_target_verify",
        Use.HOOK,
        ("self", "num_draft_tokens", "is_draft_worker"),
    ),
    Seam(
        f"{SPEC_WORKER}.alloc_memory_pool",
        Use.BASE,
        ("memory_pool_config", "req_to_token_pool", "token_to_kv_pool_allocator"),
    ),
    Seam(f"{SPEC_WORKER}.spec_v2_attn_backends", Use.BASE),
    Seam(
        f"{SPEC_WORKER}.on_verify_complete_cpu",
        Use.BASE,
        ("num_correct_drafts_per_req", "batch_size"),
    ),
    Seam("managers.tp_worker.TpModelWorker.model_runner", Use.CALL),
    Seam("managers.tp_worker.TpModelWorker.update_weights_from_tensor", Use.CALL, ("recv_req",)),
    Seam(
        "speculative.draft_worker_common.build_draft_tp_worker",
        Use.CALL,
        (
            "server_args",
            "gpu_id",
            "ps",
            "nccl_port",
            "target_model_config",
            "algo_label",
            "attention_backend_override",
        ),
    ),
    Seam(
        "speculative.dflash_info.DFlashVerifyInput",
        Use.CALL,
        (
            "draft_token",
            "positions",
            "draft_token_num",
            "custom_mask",
            "capture_hidden_mode",
            "ragged_verify_layout",
        ),
    ),
    Seam(
        "speculative.dflash_info.DFlashVerifyInput.prepare_for_verify",
        Use.CALL,
        ("batch", "target_worker"),
    ),
    Seam(DRAFT_INPUT, Use.BASE, ("topk_p", "topk_index", "bonus_tokens", "new_seq_lens")),
    Seam(f"{DRAFT_INPUT}.prepare_for_decode", Use.BASE, ("batch",)),
    Seam("managers.schedule_batch.ScheduleBatch.maybe_evict_swa", Use.CALL),
    Seam("mem_cache.allocation_sizing.get_alloc_len_per_decode", Use.HOOK, ("server_args",)),
    Seam("mem_cache.allocation_sizing.get_alloc_reserve_per_decode", Use.CALL),
    Seam(
        "mem_cache.allocation.alloc_for_spec_decode",
        Use.CALL,
        (
            "tree_cache",
            "req_to_token_pool",
            "reqs",
            "req_pool_indices",
            "cur_kv_lens",
            "cur_kv_lens_cpu",
            "nxt_kv_lens",
            "nxt_kv_lens_cpu",
            "num_needed_tokens",
            "batch",
        ),
    ),
    Seam(
        "managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens", Use.HOOK, ("self",)
    ),
    Seam("managers.schedule_batch.ScheduleBatch.prepare_for_extend", Use.HOOK, ("self",)),
    Seam("managers.tp_worker.TpModelWorker.get_worker_info", Use.HOOK, ("self",)),
    Seam(
        "managers.utils.validate_input_length",
        Use.HOOK,
        ("req", "max_req_input_len", "allow_auto_truncate"),
    ),
    Seam(
        "managers.tokenizer_manager.TokenizerManager._handle_abort_req",
        Use.HOOK,
        ("self", "recv_obj"),
    ),
    Seam(
        "managers.tokenizer_manager.TokenizerManager.create_abort_task", Use.HOOK, ("self", "obj")
    ),
    Seam("managers.tokenizer_manager.TokenizerManager.abort_request", Use.CALL, ("self", "rid")),
    Seam("managers.scheduler.Scheduler._forward_isolation", Use.HOOK, ("self", "batch", "overlap")),
    Seam(
        "sampling.penaltylib.min_new_tokens.BatchedMinNewTokensPenalizer._prepare",
        Use.HOOK,
        ("self",),
    ),
    Seam(
        "sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.apply",
        Use.HOOK,
        ("self", "logits", "repeat"),
    ),
    Seam(
        "sampling.sampling_batch_info.SamplingBatchInfo.adjusted_from_schedule_batch",
        Use.HOOK,
        ("self", "batch", "vocab_size"),
    ),
    Seam(
        f"{SAMPLER}._sync_token_ids_across_tp", Use.CALL, ("batch_next_token_ids", "sampling_info")
    ),
    Seam(
        "managers.tokenizer_manager.TokenizerManager._send_one_request",
        Use.HOOK,
        ("self", "tokenized_obj"),
    ),
    Seam("speculative.dflash_utils.validate_dflash_request", Use.HOOK, ("req", "enable_overlap")),
)
