"""Hooks: control calls that are not served, or not always."""

from dspark.host.ours import is_ours, manager_is_ours


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


def refuse_saving(original, engine, **kwargs):
    """Engine.save_remote_model and save_sharded_model ask the scheduler past the manager."""
    if manager_is_ours(engine.tokenizer_manager):
        from dspark.host.control import SAVE, not_served
        from dspark.host.refusal import NotServed

        raise NotServed(not_served(SAVE))
    return original(engine, **kwargs)


def refuse_if(fault: str | None) -> None:
    from dspark.host.refusal import NotServed

    if fault is not None:
        raise NotServed(fault)
