"""Everything of SGLang this package replaces, registers, subclasses or calls.

SGLang 0.5.17 keeps most of these private, so the version is pinned and each name is checked with
the parameters we rely on before the server starts (`verify`). SGLang only logs a hook that failed
to apply; `require_active` is therefore asked again inside the worker process, where the hooks do
their work, and stops it when one of them is not in place.
"""

import enum
import importlib.metadata
import inspect
import os
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from dspark.host import control

SGLANG_VERSION = "0.5.17"
EXTERNAL_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
MODEL_PACKAGE = "dspark.host.models"
ATTENTION_BACKEND = "dsv4"  # SGLang forces this name for the architecture; we take it over


class Use(enum.Enum):
    HOOK = "hooked"  # we run around it: its parameters must be exactly these
    BASE = "subclassed"
    CALL = "called"
    TABLE = "registered in"


class Seam(NamedTuple):
    target: str  # dotted path below `sglang.srt.`
    use: Use
    parameters: tuple[str, ...] = ()  # all of them for HOOK, those we rely on otherwise

    @property
    def path(self) -> str:
        return f"sglang.srt.{self.target}"


KVC = "mem_cache.kv_cache_configurator.KVCacheConfigurator"
REQUEST_POOL = "mem_cache.memory_pool.ReqToTokenPool"
MANAGER = "managers.tokenizer_manager.TokenizerManager"
SIGNALS = "managers.tokenizer_manager.SignalHandler"
WATCHDOG = "utils.watchdog.SubprocessWatchdog"
LOADER = "model_loader.loader.DefaultModelLoader"
CHAT = "entrypoints.openai.serving_chat.OpenAIServingChat"
ENGINE = "entrypoints.engine.Engine"
STREAMER = "managers.scheduler_components.output_streamer._GenerationStreamAccumulator"
PROFILER = "managers.scheduler_components.profiler_manager.SchedulerProfilerManager"
SAMPLER = "layers.sampler.Sampler"
SWA_ALLOCATOR = "mem_cache.allocator.swa.SWATokenToKVPoolAllocator"
PAGED_ALLOCATOR = "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
RESULTS = "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
REPORTER = "managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
DRAFT_INPUT = "speculative.dflash_info_v2.DFlashDraftInputV2"
SPEC_WORKER = "speculative.base_spec_worker.BaseSpecWorker"

SEAMS = (
    # Arguments and requests (launcher process).
    Seam("server_args.ServerArgs.__post_init__", Use.HOOK, ("self",)),
    Seam("server_args.ServerArgs.add_cli_args", Use.HOOK, ("parser",)),
    Seam("server_args.ServerArgs.__repr__", Use.HOOK, ("self",)),
    Seam("server_args.prepare_server_args", Use.CALL, ("argv",)),
    Seam("arg_groups.speculative_hook._handle_dspark", Use.HOOK, ("server_args",)),
    Seam("entrypoints.http_server.ORJSONRequest.json", Use.HOOK, ("self",)),
    Seam("entrypoints.http_server.get_global_state", Use.CALL),
    Seam("entrypoints.http_server.app", Use.TABLE),
    Seam("sampling.custom_logit_processor.CustomLogitProcessor.from_str", Use.CALL, ("json_str",)),
    Seam(
        "entrypoints.ollama.serving.OllamaServing.handle_chat",
        Use.HOOK,
        ("self", "request", "raw_request"),
    ),
    Seam(
        "entrypoints.ollama.serving.OllamaServing.handle_generate",
        Use.HOOK,
        ("self", "request", "raw_request"),
    ),
    Seam(
        "managers.tokenizer_manager.TokenizerManager.generate_request",
        Use.HOOK,
        ("self", "obj", "request"),
    ),
    Seam(
        "entrypoints.openai.serving_chat.OpenAIServingChat._validate_request",
        Use.HOOK,
        ("self", "request"),
    ),
    Seam(
        "entrypoints.ollama.serving.OllamaServing._convert_options_to_sampling_params",
        Use.HOOK,
        ("self", "options"),
    ),
    Seam(
        f"{MANAGER}._validate_one_request",
        Use.HOOK,
        ("self", "obj", "input_ids"),
    ),
    # Control calls and the parsers of answers (server process; profiles in the worker's).
    *(
        Seam(f"{MANAGER}.{method}", Use.HOOK, parameters)
        for method, (parameters, _) in control.NOT_SERVED.items()
    ),
    Seam(f"{MANAGER}.set_internal_state", Use.HOOK, ("self", "obj")),
    Seam(f"{MANAGER}.slow_down", Use.HOOK, ("self", "obj", "request")),
    Seam(f"{MANAGER}.pause_generation", Use.HOOK, ("self", "obj")),
    Seam(f"{MANAGER}._async_dispatch_to_scheduler", Use.CALL, ("obj",)),
    Seam("managers.io_struct.ContinueGenerationReqInput", Use.CALL),
    Seam(f"{MANAGER}.start_profile", Use.HOOK, ("self", "req")),
    Seam(f"{MANAGER}._execute_profile", Use.HOOK, ("self", "req")),
    Seam(f"{PROFILER}._profile", Use.HOOK, ("self", "recv_req")),
    Seam("managers.io_struct.ProfileReqOutput", Use.CALL, ("success", "message")),
    Seam("managers.io_struct.ProfileReqType.START_PROFILE", Use.CALL),
    Seam(f"{ENGINE}.save_remote_model", Use.HOOK, ("self", "kwargs")),
    Seam(f"{ENGINE}.save_sharded_model", Use.HOOK, ("self", "kwargs")),
    Seam(f"{STREAMER}.accept", Use.HOOK, ("self", "req")),
    Seam(f"{CHAT}.__init__", Use.HOOK, ("self", "tokenizer_manager", "template_manager")),
    Seam(
        f"{CHAT}._process_tool_call_stream",
        Use.HOOK,
        (
            "self",
            "index",
            "delta",
            "parser_dict",
            "content",
            "request",
            "has_tool_calls",
            "continuous_usage_stats",
        ),
    ),
    Seam(
        f"{CHAT}._process_reasoning_stream",
        Use.HOOK,
        (
            "self",
            "index",
            "delta",
            "reasoning_parser_dict",
            "content",
            "request",
            "finish_reason_type",
        ),
    ),
    Seam("function_call.deepseekv4_detector.DeepSeekV4Detector", Use.BASE),
    Seam("function_call.core_types.StreamingParseResult", Use.CALL, ("normal_text", "calls")),
    Seam("function_call.core_types.ToolCallItem", Use.CALL, ("tool_index", "name", "parameters")),
    Seam("function_call.function_call_parser.FunctionCallParser.ToolCallParserEnum", Use.TABLE),
    Seam(
        "parser.reasoning_parser.DeepSeekV4Detector",
        Use.BASE,
        ("stream_reasoning", "force_reasoning", "continue_final_message", "previous_content"),
    ),
    Seam(
        "parser.reasoning_parser.BaseReasoningFormatDetector._detect_and_parse_impl",
        Use.BASE,
        ("text",),
    ),
    Seam(
        "parser.reasoning_parser.BaseReasoningFormatDetector._parse_streaming_increment_impl",
        Use.BASE,
        ("new_text",),
    ),
    Seam("parser.reasoning_parser.BaseReasoningFormatDetector.finish", Use.BASE),
    Seam(
        "parser.reasoning_parser.StreamingParseResult",
        Use.CALL,
        ("normal_text", "reasoning_text"),
    ),
    Seam("parser.reasoning_parser.ReasoningParser.DetectorMap", Use.TABLE),
    Seam("environ.envs.SGLANG_FORWARD_UNKNOWN_TOOLS", Use.CALL),
    # Ranks that die (launcher process).
    Seam(
        "entrypoints.engine.Engine._launch_scheduler_processes",
        Use.HOOK,
        ("server_args", "port_args", "run_scheduler_process_func"),
    ),
    Seam(
        "entrypoints.engine._wait_for_scheduler_ready",
        Use.HOOK,
        ("scheduler_pipe_readers", "scheduler_procs"),
    ),
    Seam(f"{SIGNALS}.running_phase_sigquit_handler", Use.HOOK, ("self", "signum", "frame")),
    Seam(f"{WATCHDOG}.start", Use.HOOK, ("self",)),
    Seam(f"{WATCHDOG}.stop", Use.HOOK, ("self",)),
    # Memory (worker process).
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
    # Model and attention (worker process).
    Seam(f"{LOADER}._get_weights_iterator", Use.HOOK, ("self", "source")),
    Seam(
        f"{LOADER}._prepare_weights",
        Use.CALL,
        ("model_name_or_path", "revision", "fall_back_to_pt"),
    ),
    Seam("layers.attention.attention_registry.ATTENTION_BACKENDS", Use.TABLE),
    Seam("models.registry.ModelRegistry.register", Use.CALL, ("package_name", "overwrite")),
    Seam("models.registry.ModelRegistry.resolve_model_cls", Use.CALL, ("architectures",)),
    Seam("configs.model_config.is_deepseek_v4", Use.CALL, ("config",)),
    Seam(
        "layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata",
        Use.BASE,
        ("forward_batch",),
    ),
    Seam(
        "layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_out_graph",
        Use.BASE,
        ("forward_batch", "in_capture"),
    ),
    Seam(
        "layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_in_graph",
        Use.BASE,
        ("forward_batch",),
    ),
    Seam("layers.logits_processor.LogitsProcessor", Use.BASE, ("config", "skip_all_gather")),
    Seam(
        "layers.logits_processor.LogitsProcessor._get_logits",
        Use.BASE,
        ("hidden_states", "lm_head", "logits_metadata"),
    ),
    Seam(
        "layers.logits_processor.LogitsProcessor.forward",
        Use.CALL,
        ("input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states"),
    ),
    Seam("model_executor.forward_context.get_attn_backend", Use.CALL),
    Seam("distributed.get_tp_group", Use.CALL),
    # Speculative decoding (worker process).
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
        "managers.tokenizer_manager.TokenizerManager._handle_abort_req",
        Use.HOOK,
        ("self", "recv_obj"),
    ),
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
    # What the host makes of a step's tokens.
    Seam("managers.schedule_batch.Req.update_finish_state", Use.HOOK, ("self", "new_accepted_len")),
    Seam("managers.schedule_batch.Req._check_str_based_finish", Use.CALL, ("new_accepted_len",)),
    Seam("managers.schedule_batch.Req._check_token_based_finish", Use.CALL),
    Seam("managers.schedule_batch.Req.update_spec_correct_drafts_histogram", Use.CALL),
    Seam("managers.schedule_batch.Req.update_spec_cap_lens_histogram", Use.CALL),
    Seam("managers.schedule_batch.BaseFinishReason", Use.CALL),
    Seam("managers.schedule_batch.FINISH_LENGTH", Use.CALL, ("length",)),
    Seam("managers.schedule_batch.FINISH_MATCHED_TOKEN", Use.CALL, ("matched",)),
    Seam("constrained.base_grammar_backend.BaseGrammarObject.accept_token", Use.CALL, ("token",)),
    Seam("constrained.base_grammar_backend.BaseGrammarObject.rollback", Use.CALL, ("k",)),
    Seam("constrained.base_grammar_backend.BaseGrammarObject.is_terminated", Use.CALL),
    Seam(
        "constrained.base_grammar_backend.BaseGrammarObject.allocate_vocab_mask",
        Use.CALL,
        ("vocab_size", "batch_size", "device"),
    ),
    Seam(
        "constrained.base_grammar_backend.BaseGrammarObject.fill_vocab_mask",
        Use.CALL,
        ("vocab_mask", "idx"),
    ),
    Seam(f"{RESULTS}.advance_grammar_fsm", Use.HOOK, ("self", "result", "batch")),
    Seam(f"{RESULTS}._resolve_spec_v2_tokens", Use.HOOK, ("self", "result", "batch")),
    Seam(f"{RESULTS}.process_batch_result_prefill", Use.HOOK, ("self", "batch", "result")),
    Seam(
        f"{REPORTER}.report_decode_stats",
        Use.HOOK,
        ("self", "can_run_cuda_graph", "running_batch", "num_correct_drafts"),
    ),
    Seam(f"{SAMPLER}._preprocess_logits", Use.HOOK, ("self", "logits", "sampling_info")),
    Seam(
        f"{SAMPLER}.forward",
        Use.HOOK,
        (
            "self",
            "logits_output",
            "sampling_info",
            "return_logprob",
            "top_logprobs_nums",
            "token_ids_logprobs",
            "positions",
        ),
    ),
    Seam(
        "managers.scheduler.Scheduler._relay_forward_payload",
        Use.HOOK,
        ("self", "future_indices", "batch_result"),
    ),
    Seam("managers.scheduler.Scheduler.on_idle", Use.HOOK, ("self",)),
    Seam("managers.scheduler.Scheduler.is_fully_idle", Use.CALL),
    Seam("managers.scheduler.Scheduler.get_new_batch_prefill", Use.HOOK, ("self", "running_batch")),
    Seam("managers.schedule_batch.NextBatchPlan", Use.CALL, ("batch_to_run", "running_batch")),
    Seam("managers.schedule_batch.ScheduleBatch.check_decode_mem", Use.CALL, ("selected_indices",)),
    Seam("managers.scheduler.Scheduler.get_internal_state", Use.HOOK, ("self", "recv_req")),
    Seam(
        "managers.tp_worker.TpModelWorker.forward_batch_generation",
        Use.CALL,
        ("batch", "forward_batch", "is_verify", "skip_attn_backend_init", "capture_hidden_mode"),
    ),
    Seam("speculative.spec_utils.GrammarTree.from_linear_chain", Use.CALL, ("verify_ids_2d",)),
    Seam(
        "speculative.spec_utils.build_grammar_vocab_mask",
        Use.CALL,
        ("reqs", "tree", "sampling_info", "device", "barrier"),
    ),
    Seam(
        "layers.sampler.apply_custom_logit_processor",
        Use.CALL,
        ("logits", "sampling_batch_info"),
    ),
    Seam(
        "layers.logprob_processor.OutputLogprobProcessor.compute_logprobs",
        Use.CALL,
        ("logprobs", "top_logprobs_nums", "token_ids_logprobs", "batch_next_token_ids"),
    ),
    Seam(
        "layers.logprob_processor.get_token_ids_logprobs_raw",
        Use.HOOK,
        (
            "logprobs",
            "token_ids_logprobs_list",
            "stage",
            "extend_logprob_pruned_lens_cpu",
            "no_copy_to_cpu",
        ),
    ),
    Seam(
        "managers.utils.GenerationBatchResult",
        Use.CALL,
        (
            "logits_output",
            "next_token_ids",
            "accept_lens",
            "block_accept_lens",
            "cap_lens",
            "next_draft_input",
            "new_seq_lens",
            "speculative_num_draft_tokens",
        ),
    ),
    # What SGLang would otherwise run as Triton or as CUDA streams on a machine without a GPU.
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
    # Helpers that any of the above lean on.
    Seam("utils.get_device", Use.CALL),
    Seam(
        "utils.get_available_gpu_memory",
        Use.CALL,
        ("device", "gpu_id", "distributed", "cpu_group"),
    ),
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
    # The plugin interface itself.
    Seam("plugins.load_plugins", Use.CALL),
    Seam(
        "plugins.hook_registry.HookRegistry.register",
        Use.CALL,
        ("target", "hook", "hook_type"),
    ),
    Seam("plugins.hook_registry.HookRegistry._patched", Use.TABLE),
)


# What SGLang reads from the speculative worker, its model worker where there is one. All of it
# is in our class or its base; a test compares with SGLang's sources.
READ_FROM_WORKER = frozenset(
    {
        "alloc_memory_pool",
        "block_accept_estimate_log_suffix",
        "clear_cache_pool",
        "clear_info_records",
        "draft_worker",
        "dump_info_records",
        "forward_batch_generation",
        "graph_memory_usage",
        "graph_time_usage",
        "init_attention_backends",
        "init_cuda_graphs",
        "model_runner",
        "note_request_finished",
        "on_verify_complete_cpu",
        "set_dspark_forced_budget_frac",
        "spec_v2_attn_backends",
        "target_worker",
        "update_weights_from_disk",
        "update_weights_from_ipc",
        "update_weights_from_tensor",
        "war_fastpath_runner",
        "weight_load_time",
    }
)


def find_version_fault() -> str | None:
    """One sentence if SGLang is absent or not the version this package was written against."""
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        found = "no SGLang at all"
    if found == SGLANG_VERSION:
        return None
    return (
        f"this plugin works with SGLang {SGLANG_VERSION} only, but found {found}; "
        f"install it with: pip install sglang=={SGLANG_VERSION}"
    )


def find_fault(seam: Seam) -> str | None:
    """One line naming what is gone or changed; None if the seam is as we rely on it."""
    try:
        found = pkgutil.resolve_name(seam.path)
    except Exception as error:  # an import can fail in any way
        return f"{seam.path} ({seam.use.value}) cannot be found: {error}"
    if not seam.parameters:
        return None
    names = tuple(inspect.signature(found).parameters)
    if seam.use is Use.HOOK:
        if names == seam.parameters:
            return None
        return f"{seam.path} takes {names}, expected {seam.parameters}"
    lacking = [p for p in seam.parameters if p not in names]
    if lacking:
        return f"{seam.path} ({seam.use.value}) lacks the parameters {', '.join(lacking)}"
    return None


def verify(seams: Iterable[Seam] = SEAMS) -> list[str]:
    """One line per seam that is not as expected; call it before any hook is applied."""
    return [fault for seam in seams if (fault := find_fault(seam))]


def is_wrapped_by(function: Callable, hook: Callable) -> bool:
    """Whether `hook` is one of the layers SGLang's registry put around `function`."""
    layer: Callable | None = function
    while layer is not None:
        cells = getattr(layer, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        layer = getattr(layer, "__wrapped__", None)
    return False


class HookLost(RuntimeError):
    """A hook or registration is not in place in this process, so stock code would run."""


def require_active(hooks: Iterable[tuple[str, Callable]], backend_factory: Callable) -> None:
    """Stop the worker unless every hook, the attention backend and the model class are ours.

    Args:
        hooks: (target below `sglang.srt.`, our function) for each hook registered.
        backend_factory: what we put into SGLang's attention registry.

    Raises:
        HookLost: naming the first thing that is stock.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.models.registry import ModelRegistry

    for target, hook in hooks:
        if not is_wrapped_by(pkgutil.resolve_name(f"sglang.srt.{target}"), hook):
            raise HookLost(
                f"SGLang did not apply the hook on {target}; see the log above for why, "
                "and stop other plugins from replacing it."
            )
    if ATTENTION_BACKENDS.get(ATTENTION_BACKEND) is not backend_factory:
        raise HookLost(
            f"another plugin took over SGLang's attention backend {ATTENTION_BACKEND!r}."
        )
    model, _ = ModelRegistry.resolve_model_cls(["DeepseekV4ForCausalLM"])
    if not model.__module__.startswith(f"{MODEL_PACKAGE}."):
        raise HookLost(
            f"SGLang resolves DeepseekV4ForCausalLM to {model.__module__}, not to "
            f"{MODEL_PACKAGE}; see the import error in the log above."
        )


_registered = False


def note_registered() -> None:
    """SGLang has called the plugin's entry point in this process, and it came to its end."""
    global _registered
    _registered = True


def registered() -> bool:
    return _registered


_expected: tuple[Mapping[str, Callable], Callable] | None = None
_not_set_up = "this plugin was not set up in the worker process; the log above says why."


def expect_in_worker(hooks: Mapping[str, Callable], backend_factory: Callable) -> None:
    """Remember what `check_worker` shall find; called when everything has been registered."""
    global _expected
    _expected = (hooks, backend_factory)


def refuse_in_worker(sentence: str) -> None:
    """Have `check_worker` stop the process with this sentence."""
    global _not_set_up
    _not_set_up = sentence


def check_worker() -> None:
    """Raise HookLost in a worker process where stock code would run instead of ours."""
    if _expected is None:
        raise HookLost(_not_set_up)
    hooks, backend_factory = _expected
    require_active(hooks.items(), backend_factory)


def name_models() -> None:
    """Have this process and its children load our model classes, unless the user named others."""
    os.environ.setdefault(EXTERNAL_MODELS, MODEL_PACKAGE)


def register_models() -> None:
    """Put our model classes before SGLang's own, beside any package the user already named."""
    if os.environ[EXTERNAL_MODELS] != MODEL_PACKAGE:
        from sglang.srt.models.registry import ModelRegistry

        ModelRegistry.register(MODEL_PACKAGE, overwrite=True)
