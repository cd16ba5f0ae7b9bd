"""Whether the model is DeepSeek-V4: every hook asks first.

Otherwise it runs SGLang's own code, so the plugin changes nothing for other models in the same
environment. A hook only chooses; what it chooses is imported when it is needed.
"""

from dspark.host import arguments


def served_model(manager):
    """What bounds a request of this tokenizer manager; None if the model is not DeepSeek-V4."""
    from sglang.srt.configs.model_config import is_deepseek_v4

    from dspark.host.requests.rules import Model

    config = manager.model_config
    return Model(config.vocab_size) if is_deepseek_v4(config.hf_config) else None


def manager_is_ours(manager) -> bool:
    from sglang.srt.configs.model_config import is_deepseek_v4

    return is_deepseek_v4(manager.model_config.hf_config)


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
