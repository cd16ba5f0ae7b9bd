"""What SGLang calls at start: registers the hooks that put this package in SGLang's place."""

import functools
import sys
from collections.abc import Callable

from dspark.errors import UsageError
from dspark.host import (
    answer_hooks,
    argument_hooks,
    arguments,
    config_file,
    control,
    control_hooks,
    cpu_hooks,
    http_hooks,
    loading_hooks,
    memory_hooks,
    ours,
    rank_hooks,
    request_hooks,
    sampling_hooks,
    seam,
    seams,
    speculation_hooks,
    start_log,
    step_hooks,
)
from dspark.host.command_line import flag_value

HOOKS: dict[str, Callable] = {
    "server_args.ServerArgs.__post_init__": argument_hooks.resolve_arguments,
    "server_args.ServerArgs.add_cli_args": argument_hooks.add_flags,
    "server_args.ServerArgs.__repr__": argument_hooks.hide_keys,
    "entrypoints.http_server.ORJSONRequest.json": http_hooks.check_body,
    "managers.tokenizer_manager.TokenizerManager.generate_request": request_hooks.check_generate,
    "managers.tokenizer_manager.TokenizerManager._validate_one_request": request_hooks.check_prompt,
    "entrypoints.openai.serving_chat.OpenAIServingChat._validate_request": (
        http_hooks.check_conversation
    ),
    "entrypoints.ollama.serving.OllamaServing._convert_options_to_sampling_params": (
        http_hooks.name_ollama_seed
    ),
    "entrypoints.ollama.serving.OllamaServing.handle_chat": http_hooks.refuse_ollama,
    "entrypoints.ollama.serving.OllamaServing.handle_generate": http_hooks.refuse_ollama,
    "entrypoints.ollama.serving.OllamaServing._stream_chat_response": http_hooks.stream_ollama,
    "entrypoints.ollama.serving.OllamaServing._stream_generate_response": http_hooks.stream_ollama,
    **{f"{seam.MANAGER}.{method}": control_hooks.refuse_control for method in control.NOT_SERVED},
    f"{seam.MANAGER}.set_internal_state": control_hooks.check_settings,
    f"{seam.MANAGER}.slow_down": control_hooks.check_delay,
    f"{seam.MANAGER}.pause_generation": control_hooks.pause_by_abort,
    f"{seam.MANAGER}.start_profile": control_hooks.check_profile,
    f"{seam.MANAGER}._execute_profile": control_hooks.answer_profile,
    f"{seam.PROFILER}._profile": control_hooks.keep_one_profile,
    f"{seam.ENGINE}.save_remote_model": control_hooks.refuse_saving,
    f"{seam.ENGINE}.save_sharded_model": control_hooks.refuse_saving,
    "managers.schedule_batch.Req.check_match_stop_str_prefix": (
        answer_hooks.hold_back_before_half_characters
    ),
    f"{seam.STREAMER}.accept": answer_hooks.send_after_enough_tokens,
    f"{seam.ENGINE}._launch_detokenizer_subprocesses": answer_hooks.launch_detokenizer,
    f"{seam.CHAT}.__init__": answer_hooks.serve_chat,
    f"{seam.CHAT}._process_tool_call_stream": answer_hooks.finish_tool_calls,
    f"{seam.CHAT}._process_reasoning_stream": answer_hooks.finish_reasoning,
    f"{seam.RESPONSES}.responses_stream_generator_non_harmony": answer_hooks.stream_responses,
    **{
        f"{seam.RESPONSES}.{method}_responses": answer_hooks.count_as_responses_do
        for method in ("create", "retrieve", "cancel")
    },
    "entrypoints.engine.Engine._launch_scheduler_processes": rank_hooks.watch_ranks,
    "entrypoints.engine._wait_for_scheduler_ready": rank_hooks.blame_before_giving_up,
    f"{seam.SIGNALS}.running_phase_sigquit_handler": rank_hooks.blame_before_ending,
    f"{seam.WATCHDOG}.start": rank_hooks.watch_no_rank_twice,
    f"{seam.WATCHDOG}.stop": rank_hooks.stop_watching,
    "arg_groups.speculative_hook._handle_dspark": cpu_hooks.allow_dspark_on_cpu,
    f"{seam.LOADER}._get_weights_iterator": loading_hooks.hand_over_directory,
    f"{seam.KVC}._build_default_req_pool": memory_hooks.build_request_slots,
    f"{seam.KVC}._build_token_to_kv_pool": memory_hooks.build_kv_pool,
    f"{seam.KVC}._build_token_to_kv_pool_allocator": memory_hooks.build_allocator,
    f"{seam.KVC}._resolve_memory_pool_config": memory_hooks.resolve_pool_config,
    "speculative.spec_info.SpeculativeAlgorithm.create_worker": speculation_hooks.choose_worker,
    "utils.common.support_triton": cpu_hooks.without_triton_on_cpu,
    "mem_cache.allocation.get_last_loc": cpu_hooks.last_slot_in_torch,
    "managers.overlap_utils.FutureMap._resolve_spec_extras": cpu_hooks.bonus_tokens_without_stream,
    "configs.update_config.adjust_config_with_unaligned_cpu_tp": cpu_hooks.keep_head_counts,
    "mem_cache.allocation_sizing.get_alloc_len_per_decode": speculation_hooks.reserve_draft_block,
    "speculative.spec_info.SpeculativeAlgorithm.get_num_tokens_per_req_for_target_verify": (
        speculation_hooks.draft_at_trained_width
    ),
    "managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens": (
        sampling_hooks.count_penalties_later
    ),
    "managers.schedule_batch.ScheduleBatch.prepare_for_extend": sampling_hooks.recall_penalties,
    "managers.tp_worker.TpModelWorker.get_worker_info": request_hooks.refuse_unservable_prompts,
    "managers.utils.validate_input_length": request_hooks.say_why_too_long,
    "managers.tokenizer_manager.TokenizerManager._handle_abort_req": (
        request_hooks.show_all_ids_of_aborted
    ),
    f"{seam.MANAGER}.create_abort_task": request_hooks.abort_own_stream,
    "managers.scheduler.Scheduler._forward_isolation": sampling_hooks.count_penalties_at_forward,
    "sampling.penaltylib.min_new_tokens.BatchedMinNewTokensPenalizer._prepare": (
        sampling_hooks.hold_back_every_end
    ),
    "sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.apply": (
        sampling_hooks.penalise_in_order
    ),
    "sampling.sampling_batch_info.SamplingBatchInfo.adjusted_from_schedule_batch": (
        sampling_hooks.name_seeds
    ),
    "layers.sampler.Sampler.forward": sampling_hooks.draw_as_drafts_are_judged,
    "managers.tokenizer_manager.TokenizerManager._send_one_request": request_hooks.seed_choices,
    "speculative.dflash_utils.validate_dflash_request": speculation_hooks.check_draft_request,
    "managers.schedule_batch.Req.update_finish_state": step_hooks.finish_in_token_order,
    f"{seam.RESULTS}.advance_grammar_fsm": step_hooks.advance_grammar_to_the_end,
    f"{seam.RESULTS}._resolve_spec_v2_tokens": step_hooks.resolve_runs_to_the_end,
    f"{seam.RESULTS}.process_batch_result_prefill": step_hooks.advance_grammar_first,
    f"{seam.REPORTER}.report_decode_stats": step_hooks.report_steps_that_ran,
    "layers.sampler.Sampler._preprocess_logits": sampling_hooks.prepare_logits,
    "managers.scheduler.Scheduler._relay_forward_payload": sampling_hooks.relay_ordinary_tokens,
    "layers.logprob_processor.get_token_ids_logprobs_raw": sampling_hooks.empty_rows_as_tensors,
    "managers.scheduler.Scheduler.get_internal_state": step_hooks.add_dspark_section,
    "managers.scheduler.Scheduler.set_internal_state": step_hooks.measure_steps,
    "managers.scheduler.Scheduler.on_idle": memory_hooks.check_state_when_idle,
    "managers.scheduler.Scheduler.get_new_batch_prefill": step_hooks.decode_between_chunks,
    "constrained.xgrammar_backend._allocate_token_bitmask": cpu_hooks.mask_without_pinned_memory,
    "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask": cpu_hooks.mask_logits_on_cpu,
}


def make_backend(runner):
    """Attention backend of the target or draft runner; the worker checks itself here too."""
    seams.check_worker()
    from dspark.host.backend import make_backend

    return make_backend(runner)


def refuse_model(sentence: str) -> None:
    """Leave SGLang as it is, but stop it from serving DeepSeek-V4 with its stock classes.

    Three times, since an SGLang that we do not know may have lost any of the places: by the model
    that the command line names, where the arguments are made, and where a worker would build the
    model (`seams.check_worker`).

    Raises:
        UsageError: the command line names a DeepSeek-V4.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    seams.refuse_in_worker(sentence)
    path = flag_value(sys.argv, "--model-path", "--model")
    if path and config_file.is_deepseek_v4(path, flag_value(sys.argv, "--revision")):
        raise UsageError(sentence)

    def stop(server_args):
        if arguments.is_deepseek_v4(server_args):
            raise UsageError(sentence)

    HookRegistry.register("sglang.srt.server_args.ServerArgs.__post_init__", stop, HookType.BEFORE)


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`; SGLang calls it once in every process.

    SGLang logs what this raises and goes on without us. Hence the model class is named before
    anything can fail: where it is built in a worker, it stops (`check_worker`).
    """
    seams.name_models()
    if fault := seams.find_version_fault():
        refuse_model(fault)
    else:
        try:
            put_in_place()
        except Exception as error:
            refuse_model(f"this plugin could not be set up ({error}); reinstall SGLang.")
            raise
    seams.note_registered()


def put_in_place() -> None:
    """Register every hook, or refuse the model where SGLang is not as we rely on it."""
    seams.register_models()  # first: checking the seams imports SGLang's model registry
    if faults := seams.verify():
        print(*(f"dspark: {line}" for line in faults), sep="\n", file=sys.stderr, flush=True)
        refuse_model(
            f"{len(faults)} of the places where this plugin meets SGLang are not as expected "
            "(listed above); reinstall SGLang."
        )
        return
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    start_log.leave_out_what_is_untrue(ours.is_ours_so_far)
    for target, hook in HOOKS.items():
        HookRegistry.register(f"sglang.srt.{target}", hook, HookType.AROUND)
    ATTENTION_BACKENDS[seams.ATTENTION_BACKEND] = make_backend
    describe_invalid_requests()
    seams.expect_in_worker(HOOKS, make_backend)


def describe_invalid_requests() -> None:
    """Answer what pydantic refuses in our words."""
    from fastapi.exceptions import RequestValidationError
    from sglang.srt.entrypoints.http_server import app

    stock = app.exception_handlers[RequestValidationError]
    app.exception_handlers[RequestValidationError] = functools.partial(
        http_hooks.describe_invalid, stock
    )
