"""Control calls that are not served: each answers with one sentence, in every state and both modes.

They are stopped where all ways pass, in SGLang's tokenizer manager: HTTP, gRPC and the Engine call
the same methods. Nothing reaches the scheduler, so running and waiting requests do not notice.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path

UPDATE = "updating weights: they are repacked when they are loaded; start a new server instead"
SEND = "sending weights: they are repacked when they are loaded"
SAVE = "saving weights: they are repacked when they are loaded; copy the checkpoint instead"
READ = "reading weights: they are repacked when they are loaded"
PAUSE = "releasing memory: weights and pools stay where they are; use /pause_generation instead"
LORA = "LoRA adapters"
EXPERTS = "recording which experts are used"
HOST_TIER = "a host tier for the cache"
NGRAM = "drafting from n-grams"

# Method of SGLang's TokenizerManager -> its parameters and what is not served.
NOT_SERVED: dict[str, tuple[tuple[str, ...], str]] = {
    "update_weights_from_disk": (("self", "obj", "request"), UPDATE),
    "update_weights_from_tensor": (("self", "obj", "request"), UPDATE),
    "update_weights_from_distributed": (("self", "obj", "request"), UPDATE),
    "update_weights_from_ipc": (("self", "obj", "request"), UPDATE),
    "init_weights_update_group": (("self", "obj", "request"), UPDATE),
    "destroy_weights_update_group": (("self", "obj", "request"), UPDATE),
    "init_weights_send_group_for_remote_instance": (("self", "obj", "request"), SEND),
    "send_weights_to_remote_instance": (("self", "obj", "request"), SEND),
    "get_weights_by_name": (("self", "obj", "request"), READ),
    "check_weights": (("self", "obj", "request"), READ),
    "release_memory_occupation": (("self", "obj", "request"), PAUSE),
    "resume_memory_occupation": (("self", "obj", "request"), PAUSE),
    "load_lora_adapter": (("self", "obj", "_"), LORA),
    "load_lora_adapter_from_tensors": (("self", "obj", "_"), LORA),
    "unload_lora_adapter": (("self", "obj", "_"), LORA),
    "start_expert_distribution_record": (("self",), EXPERTS),
    "stop_expert_distribution_record": (("self",), EXPERTS),
    "dump_expert_distribution_record": (("self",), EXPERTS),
    "clear_hicache_storage": (("self",), HOST_TIER),
    "attach_hicache_storage": (
        (
            "self",
            "hicache_storage_backend",
            "hicache_storage_backend_extra_config_json",
            "hicache_storage_prefetch_policy",
            "hicache_write_policy",
        ),
        HOST_TIER,
    ),
    "detach_hicache_storage": (("self",), HOST_TIER),
    "add_external_corpus": (("self", "obj"), NGRAM),
    "remove_external_corpus": (("self", "corpus_id"), NGRAM),
    "list_external_corpora": (("self",), NGRAM),
}

# What /set_internal_state may change.
SETTINGS = ("pp_max_micro_batch_size", "dspark_force_budget_frac", "dspark_clear_info_records")
PROFILED = ("CPU", "GPU")
LONGEST_DELAY_S = 10


def refused_sentence(method: str) -> str:
    """What the call of a method of NOT_SERVED is answered with."""
    return not_served(NOT_SERVED[method][1])


def not_served(what: str) -> str:
    return f"sglang-dspark does not serve {what}."


def find_settings_fault(settings: Mapping[str, object]) -> str | None:
    """One sentence if /set_internal_state asks for something else than SETTINGS can be."""
    for name, value in settings.items():
        if name not in SETTINGS:
            return (
                f"{name} cannot be changed while the server runs; only {', '.join(SETTINGS)} can."
            )
        if name == "pp_max_micro_batch_size" and not (isinstance(value, int) and value >= 1):
            return f"{name} must be a whole number of requests from 1 on, not {value}."
    return None


def find_profile_fault(wish) -> str | None:
    """One sentence if a profile (SGLang's ProfileReq) cannot be taken or written.

    SGLang would find out inside a step, where it ends the server.
    """
    if wish.profile_by_stage or wish.profile_stages:
        return "profile_by_stage: a verify step is neither prefill nor decode; leave it out."
    if unknown := [name for name in wish.activities or () if name not in PROFILED]:
        return f"activities {unknown} cannot be profiled; only {', '.join(PROFILED)} can."
    for name in ("start_step", "num_steps"):
        steps = getattr(wish, name)
        if steps is not None and steps < 1:
            return f"{name} must be at least 1, not {steps}."
    directory = Path(wish.output_dir or os.environ.get("SGLANG_TORCH_PROFILER_DIR", "/tmp"))
    try:
        directory.expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"output_dir {directory} cannot be made: {error.strerror}."
    if not os.access(directory.expanduser(), os.W_OK):
        return f"output_dir {directory} cannot be written to."
    return None


def find_delay_fault(seconds: float | None) -> str | None:
    """One sentence if /slow_down asks for a sleep between steps that would look like a hang."""
    if seconds is None or (math.isfinite(seconds) and seconds <= LONGEST_DELAY_S):
        return None
    return f"forward_sleep_time must be at most {LONGEST_DELAY_S} seconds, not {seconds}."


async def abort_behind_a_pause(original, manager, obj):
    """TokenizerManager.pause_generation waits until nothing runs; a paused scheduler never ends
    what it holds, so it has to move on first. New requests go on waiting for /continue_generation.
    """
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    if manager.is_pause:
        await manager._async_dispatch_to_scheduler(ContinueGenerationReqInput())
    await original(manager, obj)
