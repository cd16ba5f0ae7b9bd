"""What SGLang calls at start: registers the hooks that put this package in SGLang's place."""

import functools
import sys
from collections.abc import Callable

from dspark.errors import UsageError
from dspark.host import (
    arguments,
    config_file,
    control,
    cpu_hooks,
    hooks,
    http_hooks,
    seams,
    start_log,
)
from dspark.host.command_line import flag_value

HOOKS: dict[str, Callable] = {
    "server_args.ServerArgs.__post_init__": hooks.resolve_arguments,
    "server_args.ServerArgs.add_cli_args": hooks.add_flags,
    "server_args.ServerArgs.__repr__": hooks.hide_keys,
    "entrypoints.http_server.ORJSONRequest.json": http_hooks.check_body,
    "managers.tokenizer_manager.TokenizerManager.generate_request": hooks.check_generate,
    "managers.tokenizer_manager.TokenizerManager._validate_one_request": hooks.check_prompt,
    "entrypoints.openai.serving_chat.OpenAIServingChat._validate_request": (
        http_hooks.check_conversation
    ),
    "entrypoints.ollama.serving.OllamaServing._convert_options_to_sampling_params": (
        http_hooks.name_ollama_seed
    ),
    "entrypoints.ollama.serving.OllamaServing.handle_chat": http_hooks.refuse_ollama,
    "entrypoints.ollama.serving.OllamaServing.handle_generate": http_hooks.refuse_ollama,
    **{f"{seams.MANAGER}.{method}": hooks.refuse_control for method in control.NOT_SERVED},
    f"{seams.MANAGER}.set_internal_state": hooks.check_settings,
    f"{seams.MANAGER}.slow_down": hooks.check_delay,
    f"{seams.MANAGER}.pause_generation": hooks.pause_by_abort,
    f"{seams.MANAGER}.start_profile": hooks.check_profile,
    f"{seams.MANAGER}._execute_profile": hooks.answer_profile,
    f"{seams.PROFILER}._profile": hooks.keep_one_profile,
    f"{seams.ENGINE}.save_remote_model": hooks.refuse_saving,
    f"{seams.ENGINE}.save_sharded_model": hooks.refuse_saving,
    f"{seams.STREAMER}.accept": hooks.send_after_enough_tokens,
    f"{seams.CHAT}.__init__": hooks.serve_chat,
    f"{seams.CHAT}._process_tool_call_stream": hooks.finish_tool_calls,
    f"{seams.CHAT}._process_reasoning_stream": hooks.finish_reasoning,
    "entrypoints.engine.Engine._launch_scheduler_processes": hooks.watch_ranks,
    "entrypoints.engine._wait_for_scheduler_ready": hooks.blame_before_giving_up,
    f"{seams.SIGNALS}.running_phase_sigquit_handler": hooks.blame_before_ending,
    f"{seams.WATCHDOG}.start": hooks.watch_no_rank_twice,
    f"{seams.WATCHDOG}.stop": hooks.stop_watching,
    "arg_groups.speculative_hook._handle_dspark": cpu_hooks.allow_dspark_on_cpu,
    f"{seams.LOADER}._get_weights_iterator": hooks.hand_over_directory,
    f"{seams.KVC}._build_default_req_pool": hooks.build_request_slots,
    f"{seams.KVC}._build_token_to_kv_pool": hooks.build_kv_pool,
    f"{seams.KVC}._build_token_to_kv_pool_allocator": hooks.build_allocator,
    f"{seams.KVC}._resolve_memory_pool_config": hooks.resolve_pool_config,
    "speculative.spec_info.SpeculativeAlgorithm.create_worker": hooks.choose_worker,
    "utils.common.support_triton": cpu_hooks.without_triton_on_cpu,
    "mem_cache.allocation.get_last_loc": cpu_hooks.last_slot_in_torch,
    "managers.overlap_utils.FutureMap._resolve_spec_extras": cpu_hooks.bonus_tokens_without_stream,
    "configs.update_config.adjust_config_with_unaligned_cpu_tp": cpu_hooks.keep_head_counts,
    "mem_cache.allocation_sizing.get_alloc_len_per_decode": hooks.reserve_draft_block,
    "speculative.spec_info.SpeculativeAlgorithm.get_num_tokens_per_req_for_target_verify": (
        hooks.draft_at_trained_width
    ),
    "managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens": (
        hooks.count_penalties_later
    ),
    "managers.schedule_batch.ScheduleBatch.prepare_for_extend": hooks.recall_penalties,
    "managers.tp_worker.TpModelWorker.get_worker_info": hooks.refuse_unservable_prompts,
    "managers.tokenizer_manager.TokenizerManager._handle_abort_req": (
        hooks.show_all_ids_of_aborted
    ),
    "managers.scheduler.Scheduler._forward_isolation": hooks.count_penalties_at_forward,
    "sampling.penaltylib.min_new_tokens.BatchedMinNewTokensPenalizer._prepare": (
        hooks.hold_back_every_end
    ),
    "sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.apply": hooks.penalise_in_order,
    "sampling.sampling_batch_info.SamplingBatchInfo.adjusted_from_schedule_batch": hooks.name_seeds,
    "layers.sampler.Sampler.forward": hooks.draw_as_drafts_are_judged,
    "managers.tokenizer_manager.TokenizerManager._send_one_request": hooks.seed_choices,
    "speculative.dflash_utils.validate_dflash_request": hooks.check_draft_request,
    "managers.schedule_batch.Req.update_finish_state": hooks.finish_in_token_order,
    f"{seams.RESULTS}.advance_grammar_fsm": hooks.advance_grammar_to_the_end,
    f"{seams.RESULTS}._resolve_spec_v2_tokens": hooks.resolve_runs_to_the_end,
    f"{seams.RESULTS}.process_batch_result_prefill": hooks.advance_grammar_first,
    f"{seams.REPORTER}.report_decode_stats": hooks.report_steps_that_ran,
    "layers.sampler.Sampler._preprocess_logits": hooks.prepare_logits,
    "managers.scheduler.Scheduler._relay_forward_payload": hooks.relay_ordinary_tokens,
    "layers.logprob_processor.get_token_ids_logprobs_raw": hooks.empty_rows_as_tensors,
    "managers.scheduler.Scheduler.get_internal_state": hooks.add_dspark_section,
    "managers.scheduler.Scheduler.on_idle": hooks.check_state_when_idle,
    "managers.scheduler.Scheduler.get_new_batch_prefill": hooks.decode_between_chunks,
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

    start_log.leave_out_what_is_untrue(hooks.is_ours_so_far)
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
