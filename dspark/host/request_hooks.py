"""Hooks: requests between the door and the scheduler."""

from dspark.host.ours import manager_is_ours, served_model


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


def seed_choices(original, manager, request):
    """SGLang gives all `n` choices of a request the same seed, and so the same text."""
    from sglang.srt.configs.model_config import is_deepseek_v4

    if is_deepseek_v4(manager.model_config.hf_config):
        from dspark.host.choices import seed_choice

        seed_choice(manager, request)
    return original(manager, request)


def show_all_ids_of_aborted(original, manager, recv_obj):
    """The event of a request aborted while it waits repeats its last token only."""
    state = manager.rid_to_state.get(recv_obj.rid)
    original(manager, recv_obj)
    whole = state is not None and not manager.incremental_streaming_output
    if whole and state.out_list and manager_is_ours(manager):
        state.out_list[-1]["output_ids"] = list(state.output_ids)


def abort_own_stream(original, manager, obj):
    """SGLang aborts whoever bears the name of a stream two seconds after it ended."""
    if not manager_is_ours(manager):
        return original(manager, obj)
    from dspark.host import abandoned

    return abandoned.abort_task(manager, obj)


def refuse_unservable_prompts(original, worker):
    info = original(worker)
    from dspark.host.pools import DSparkKVPool

    if not isinstance(worker.model_runner.token_to_kv_pool, DSparkKVPool):
        return info
    from sglang.srt.runtime_context import get_schedule

    from dspark.host.admission import Room, limit_prompts

    room = Room(
        total=info[0],
        window=worker.model_runner.token_to_kv_pool_allocator.size_swa,
        context=worker.model_config.context_len,
        chunked=(get_schedule().chunked_prefill_size or 0) > 0,
    )
    return limit_prompts(info, room)


def say_why_too_long(original, req, max_req_input_len, allow_auto_truncate):
    from dspark.host.admission import check_length

    return check_length(original, req, max_req_input_len, allow_auto_truncate)
