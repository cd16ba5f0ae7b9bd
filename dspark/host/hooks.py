"""Hooks for every machine: where SGLang would do something else for DeepSeek-V4 than we need.

Every hook asks first whether the model is DeepSeek-V4 and otherwise runs SGLang's own code, so
the plugin changes nothing for other models in the same environment. The functions here only
choose; what they choose is imported when it is needed.
"""

from dspark.host import arguments


def resolve_arguments(original, server_args):
    """ServerArgs.__post_init__: our refusals and defaults, then SGLang's own resolution."""
    arguments.resolve(original, server_args)


def add_flags(original, parser):
    """ServerArgs.add_cli_args: any model's server takes them, and only ours reads them."""
    from dspark.host.command_line import add_flags

    add_flags(parser)
    original(parser)


def hide_keys(original, server_args):
    """ServerArgs.__repr__, which SGLang writes into its log: for every model."""
    from dspark.host.command_line import hide_keys

    return hide_keys(original(server_args), server_args)


def served_model(manager):
    """What bounds a request of this tokenizer manager; None if the model is not DeepSeek-V4."""
    from sglang.srt.configs.model_config import is_deepseek_v4

    from dspark.host.requests.rules import Model

    config = manager.model_config
    return Model(config.vocab_size) if is_deepseek_v4(config.hf_config) else None


def check_generate(original, manager, obj, request=None):
    """TokenizerManager.generate_request: where requests of every endpoint and of Engine meet."""
    model = served_model(manager)
    if model is not None:
        from dspark.host.requests import door

        door.check_generate(obj, model)
    return original(manager, obj, request)


def check_prompt(original, manager, obj, input_ids):
    """TokenizerManager._validate_one_request checks lengths, and what the operator allows."""
    model = served_model(manager)
    if model is None:
        return original(manager, obj, input_ids)
    from dspark.host.requests import door

    door.check_prompt(obj, input_ids, model)
    original(manager, obj, input_ids)
    if obj.custom_logit_processor is not None:
        door.check_processor(obj.custom_logit_processor)


def hand_over_directory(original, loader, source):
    """DefaultModelLoader._get_weights_iterator would read every tensor whole in every rank.

    SGLang finds, downloads and verifies the files; our models read what they need of them, and are
    given the directory in place of tensors.
    """
    if not is_ours():
        return original(loader, source)
    directory, _, _ = loader._prepare_weights(
        source.model_or_path, source.revision, source.fall_back_to_pt
    )
    return iter([(directory, None)])


def build_request_slots(original, configurator, **kwargs):
    from sglang.srt.configs.model_config import is_deepseek_v4

    if not is_deepseek_v4(configurator.model_config.hf_config):
        return original(configurator, **kwargs)
    from dspark.host.request_slots import build_request_slots

    return build_request_slots(configurator, **kwargs)


def refuse_control(original, manager, *args, **kwargs):
    """Around every method of `control.NOT_SERVED`."""
    if manager_is_ours(manager):
        from dspark.host.control import refused_sentence
        from dspark.host.refusal import NotServed

        raise NotServed(refused_sentence(original.__name__))
    return original(manager, *args, **kwargs)


def check_settings(original, manager, obj):
    if manager_is_ours(manager):
        from dspark.host import control

        refuse_if(control.find_settings_fault(obj.server_args))
    return original(manager, obj)


def check_delay(original, manager, obj, request=None):
    if manager_is_ours(manager):
        from dspark.host import control

        refuse_if(control.find_delay_fault(obj.forward_sleep_time))
    return original(manager, obj, request)


def pause_by_abort(original, manager, obj):
    if obj.mode != "abort" or not manager_is_ours(manager):
        return original(manager, obj)
    from dspark.host.control import abort_behind_a_pause

    return abort_behind_a_pause(original, manager, obj)


def check_profile(original, manager, req=None):
    if req is not None and manager_is_ours(manager):
        from dspark.host import control

        refuse_if(control.find_profile_fault(req))
    return original(manager, req)


def answer_profile(original, manager, req):
    if not manager_is_ours(manager):
        return original(manager, req)
    from dspark.host.refusal import with_its_sentence

    return with_its_sentence(original(manager, req))


def keep_one_profile(original, profiler, recv_req):
    """SGLang says that a profile is being taken, and starts another one over it all the same."""
    if not is_ours():
        return original(profiler, recv_req)
    from sglang.srt.managers.io_struct import ProfileReqOutput, ProfileReqType

    if recv_req.req_type == ProfileReqType.START_PROFILE and profiler.profile_in_progress:
        message = "Profiling is already in progress; call /stop_profile first."
        return ProfileReqOutput(success=False, message=message)
    return original(profiler, recv_req)


def refuse_if(fault: str | None) -> None:
    from dspark.host.refusal import NotServed

    if fault is not None:
        raise NotServed(fault)


def serve_chat(original, serving, tokenizer_manager, template_manager):
    """OpenAIServingChat.__init__ is where a process first needs the parsers of answers."""
    if manager_is_ours(tokenizer_manager):
        from dspark.host import parsers

        parsers.install()
    original(serving, tokenizer_manager, template_manager)


def finish_tool_calls(original, serving, *args, **kwargs):
    if not manager_is_ours(serving.tokenizer_manager):
        return original(serving, *args, **kwargs)
    from dspark.host import parsers

    return parsers.finish_tool_calls(original, serving, *args, **kwargs)


def finish_reasoning(original, serving, *args, **kwargs):
    if not manager_is_ours(serving.tokenizer_manager):
        return original(serving, *args, **kwargs)
    from dspark.host import parsers

    return parsers.finish_reasoning(original, serving, *args, **kwargs)


def send_after_enough_tokens(original, accumulator, *, req):
    """_GenerationStreamAccumulator.accept, which waits for numbers that a step may jump over."""
    if not req.stream or req.finished() or not is_ours():
        return original(accumulator, req=req)
    from dspark.host import stream_interval

    return stream_interval.accept(original, accumulator, req)


def refuse_saving(original, engine, **kwargs):
    """Engine.save_remote_model and save_sharded_model ask the scheduler past the manager."""
    if manager_is_ours(engine.tokenizer_manager):
        from dspark.host.control import SAVE, not_served
        from dspark.host.refusal import NotServed

        raise NotServed(not_served(SAVE))
    return original(engine, **kwargs)


def build_kv_pool(original, configurator, **kwargs):
    if not kwargs["is_dsv4_model"]:
        return original(configurator, **kwargs)
    from dspark.host.pools import build_kv_pool

    return build_kv_pool(
        configurator, sizes=kwargs["sizes"], req_to_token_pool=kwargs["req_to_token_pool"]
    )


def build_allocator(original, configurator, **kwargs):
    # A draft runner brings the target's allocator along and only shares its mapping.
    if not kwargs["is_dsv4_model"] or kwargs["token_to_kv_pool_allocator"] is not None:
        return original(configurator, **kwargs)
    from dspark.host.allocator import build_allocator

    return build_allocator(
        configurator, sizes=kwargs["sizes"], token_to_kv_pool=kwargs["token_to_kv_pool"]
    )


def resolve_pool_config(original, configurator, pre_model_load_memory):
    from sglang.srt.configs.model_config import is_deepseek_v4

    if not is_deepseek_v4(configurator.model_config.hf_config):
        return original(configurator, pre_model_load_memory)
    from dspark.host.pools import resolve_pool_config

    return resolve_pool_config(configurator, pre_model_load_memory)


def choose_worker(original, algorithm, server_args):
    if not (algorithm.is_dspark() and arguments.is_deepseek_v4(server_args)):
        return original(algorithm, server_args)
    from dspark.host.worker import DSparkWorker

    return DSparkWorker


def reserve_draft_block(original, server_args=None):
    """A draft block is written at its trained width, also where fewer drafts are verified."""
    from sglang.srt.runtime_context import get_server_args

    reserved = original(server_args)
    args = server_args or get_server_args()
    if args.speculative_algorithm != "DSPARK" or not arguments.is_deepseek_v4(args):
        return reserved
    return max(reserved, arguments.draft_block_size(args))


def draft_at_trained_width(original, algorithm, num_draft_tokens, is_draft_worker):
    """Rows of a request in a captured graph; a draft block is never narrower than trained."""
    rows = original(algorithm, num_draft_tokens, is_draft_worker)
    if not (algorithm.is_dspark() and is_draft_worker):
        return rows
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    return arguments.draft_block_size(args) if arguments.is_deepseek_v4(args) else rows


def is_ours() -> bool:
    """Whether the model of this process is DeepSeek-V4."""
    from sglang.srt.runtime_context import get_server_args

    return arguments.is_deepseek_v4(get_server_args())


def is_ours_so_far() -> bool:
    """`is_ours`, and False where this process does not know its arguments yet."""
    try:
        return is_ours()
    except ValueError:
        return False


def count_penalties_later(original, batch):
    if batch.enable_overlap and is_ours():
        return None  # counted by count_penalties_at_forward
    return original(batch)


def count_penalties_at_forward(original, scheduler, batch, overlap):
    if overlap and is_ours():
        from dspark.host.target_penalties import count_token_in_flight

        count_token_in_flight(batch)
    return original(scheduler, batch, overlap=overlap)


def recall_penalties(original, batch):
    original(batch)
    if is_ours():
        from dspark.host.target_penalties import recall_output

        recall_output(batch)


def refuse_unservable_prompts(original, worker):
    info = original(worker)
    from dspark.host.pools import DSparkKVPool

    if not isinstance(worker.model_runner.token_to_kv_pool, DSparkKVPool):
        return info
    from sglang.srt.runtime_context import get_schedule

    from dspark.host.admission import limit_prompts

    window = worker.model_runner.token_to_kv_pool_allocator.size_swa
    return limit_prompts(info, window, chunked=(get_schedule().chunked_prefill_size or 0) > 0)


def show_all_ids_of_aborted(original, manager, recv_obj):
    """The event of a request aborted while it waits repeats its last token only."""
    state = manager.rid_to_state.get(recv_obj.rid)
    original(manager, recv_obj)
    whole = state is not None and not manager.incremental_streaming_output
    if whole and state.out_list and manager_is_ours(manager):
        state.out_list[-1]["output_ids"] = list(state.output_ids)


def manager_is_ours(manager) -> bool:
    from sglang.srt.configs.model_config import is_deepseek_v4

    return is_deepseek_v4(manager.model_config.hf_config)


def hold_back_every_end(original, penalizer):
    original(penalizer)
    if is_ours():
        from dspark.host.target_penalties import hold_back_every_end

        hold_back_every_end(penalizer)


def penalise_in_order(original, orchestrator, logits, repeat=None):
    if repeat is not None or not is_ours():
        return original(orchestrator, logits, repeat)
    from dspark.host.target_penalties import apply_in_order

    return apply_in_order(orchestrator, logits)


def name_seeds(original, info, batch, vocab_size):
    """SGLang reads seeds only where a server-wide flag asks for it, and never derives any."""
    original(info, batch, vocab_size)
    if batch.spec_algorithm.is_none() and is_ours():
        from sglang.srt.runtime_context import get_server_args

        from dspark.host.sampling_info import seeds_of

        info.sampling_seed = seeds_of(batch.reqs, get_server_args().random_seed).to(
            info.device, non_blocking=True
        )


def draw_as_drafts_are_judged(
    original,
    sampler,
    logits_output,
    sampling_info,
    return_logprob,
    top_logprobs_nums,
    token_ids_logprobs,
    positions,
):
    """Target-only: the same token for a seed and a position as with drafts."""
    given = (
        logits_output,
        sampling_info,
        return_logprob,
        top_logprobs_nums,
        token_ids_logprobs,
        positions,
    )
    if not is_ours():
        return original(sampler, *given)
    from dspark.host.target_sampler import sample

    return sample(sampler, *given)


def seed_choices(original, manager, request):
    """SGLang gives all `n` choices of a request the same seed, and so the same text."""
    from sglang.srt.configs.model_config import is_deepseek_v4

    if is_deepseek_v4(manager.model_config.hf_config):
        from dspark.host.choices import seed_choice

        seed_choice(manager, request)
    return original(manager, request)


def check_draft_request(original, req, enable_overlap):
    """SGLang refuses log probabilities for this family of drafts; our worker returns them."""
    if not is_ours():
        return original(req, enable_overlap)
    if req.return_hidden_states:
        return "DSpark returns no hidden states; ask a server without --speculative-algorithm."
    return None


def finish_in_token_order(original, req, new_accepted_len=1):
    """SGLang tests its rules one after the other on all new tokens, not token after token."""
    if not is_ours():
        return original(req, new_accepted_len)
    from sglang.srt.runtime_context import get_spec

    from dspark.host.finish import update_finish_state

    return update_finish_state(req, grammar_behind=get_spec().speculative_algorithm is None)


def is_our_draft(batch) -> bool:
    return batch.spec_algorithm.is_dspark() and is_ours()


def advance_grammar_to_the_end(original, processor, result, batch):
    if not is_our_draft(batch):
        return original(processor, result, batch)
    from dspark.host.accepted_runs import advance_grammars

    return advance_grammars(result, batch)


def resolve_runs_to_the_end(original, processor, result, batch):
    if not is_our_draft(batch):
        return original(processor, result, batch)
    from dspark.host.accepted_runs import resolve

    return resolve(processor, result, batch)


def advance_grammar_first(original, processor, batch, result):
    """With DSpark a grammar has seen a token when its end is tested, also after a prompt."""
    if is_our_draft(batch):
        processor.advance_grammar_fsm(result, batch)
    return original(processor, batch, result)


def report_steps_that_ran(original, reporter, can_run_cuda_graph, **kwargs):
    """A step that ran for finished requests only would be divided by, and is none."""
    speculating = not reporter.scheduler.spec_algorithm.is_none()
    if speculating and is_ours() and reporter.spec_num_forward_ct == 0:
        return None
    return original(reporter, can_run_cuda_graph, **kwargs)


def prepare_logits(original, sampler, logits, sampling_info):
    if not is_ours():
        return original(sampler, logits, sampling_info)
    from dspark.host.no_choice import prepare

    return prepare(logits, sampling_info)


def relay_ordinary_tokens(original, scheduler, future_indices, batch_result):
    """The device goes on with a token that exists; the host sees the mark."""
    marked = batch_result.next_token_ids
    if batch_result.next_draft_input is not None or marked is None or not is_ours():
        return original(scheduler, future_indices, batch_result)
    from dspark.host.no_choice import unmarked

    batch_result.next_token_ids = unmarked(marked)
    original(scheduler, future_indices, batch_result)
    batch_result.next_token_ids = marked


def add_dspark_section(original, scheduler, recv_req):
    output = original(scheduler, recv_req)
    section = output.internal_state.pop("dspark_info_record", None) or {}
    if is_ours():
        from dspark.host.server_section import of_target

        section |= of_target(scheduler.tp_worker.model_runner)
    if section:
        output.internal_state["dspark"] = section
    if "mean_accepted_length" in section:
        # SGLang's own figure is as old as the last line of its log.
        output.internal_state["avg_spec_accept_length"] = section["mean_accepted_length"]
    return output


def decode_between_chunks(original, scheduler, running_batch):
    """SGLang runs all chunks of a long prompt before the next decode step."""
    if is_ours():
        from sglang.srt.managers.schedule_batch import NextBatchPlan

        from dspark.host.decode_turn import is_due

        if is_due(scheduler, running_batch):
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
    return original(scheduler, running_batch)


def check_state_when_idle(original, scheduler):
    """SGLang checks its own pools for leaks here; the compress state follows."""
    original(scheduler)
    from dspark.host.pools import DSparkKVPool

    pool = scheduler.tp_worker.model_runner.token_to_kv_pool
    if isinstance(pool, DSparkKVPool) and scheduler.is_fully_idle():
        pool.state.check_when_idle()


def empty_rows_as_tensors(
    original,
    logprobs,
    token_ids_logprobs_list,
    stage,
    extend_logprob_pruned_lens_cpu=None,
    no_copy_to_cpu=False,
):
    """get_token_ids_logprobs_raw: a request that asks for no tokens beside one that does.

    SGLang puts an empty list among the tensors, and the scheduler then ends on asking it for its
    values.
    """
    values, tokens = original(
        logprobs,
        token_ids_logprobs_list,
        stage,
        extend_logprob_pruned_lens_cpu,
        no_copy_to_cpu,
    )
    if no_copy_to_cpu and is_ours():
        values = [logprobs.new_empty(0) if isinstance(row, list) else row for row in values]
    return values, tokens


def watch_ranks(original, engine, server_args, port_args, run_scheduler_process_func):
    """Engine._launch_scheduler_processes: they are watched before they have loaded anything."""
    started = original(engine, server_args, port_args, run_scheduler_process_func)
    if arguments.is_deepseek_v4(server_args):
        from dspark.host import rank_watch

        _, processes = started
        rank_watch.begin(processes, server_args.node_rank * len(processes))
    return started


def blame_before_giving_up(original, *args):
    """Where SGLang learns that a rank has failed while the server starts."""
    from dspark.host import rank_watch

    try:
        return original(*args)
    except RuntimeError:
        rank_watch.blame()
        raise


def blame_before_ending(original, handler, signum=None, frame=None):
    """Where SGLang learns that a rank has failed while the server runs."""
    from dspark.host import rank_watch

    rank_watch.blame()
    return original(handler, signum, frame)


def watch_no_rank_twice(original, watchdog):
    """SubprocessWatchdog.start: the ranks are ours to watch, the rest is SGLang's."""
    from dspark.host import rank_watch

    if rank_watch.is_of_server(watchdog):
        rank_watch.leave_ranks_out(watchdog)
    return original(watchdog)


def stop_watching(original, watchdog):
    """SubprocessWatchdog.stop: SGLang calls it before it ends its own processes."""
    from dspark.host import rank_watch

    if rank_watch.is_of_server(watchdog):
        rank_watch.stop()
    return original(watchdog)
