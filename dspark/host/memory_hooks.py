"""Hooks: request slots, pools and their sizes."""


def build_request_slots(original, configurator, **kwargs):
    from sglang.srt.configs.model_config import is_deepseek_v4

    if not is_deepseek_v4(configurator.model_config.hf_config):
        return original(configurator, **kwargs)
    from dspark.host.request_slots import build_request_slots

    return build_request_slots(configurator, **kwargs)


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


def check_state_when_idle(original, scheduler):
    """SGLang checks its own pools for leaks here; the compress state follows."""
    original(scheduler)
    from dspark.host.pools import DSparkKVPool

    pool = scheduler.tp_worker.model_runner.token_to_kv_pool
    if isinstance(pool, DSparkKVPool) and scheduler.is_fully_idle():
        pool.state.check_when_idle()
