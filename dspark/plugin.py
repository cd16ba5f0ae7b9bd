"""What SGLang calls at start: registers the hooks that put this package in SGLang's place.

Every hook asks first whether the model is DeepSeek-V4 and otherwise runs SGLang's own code, so
the plugin changes nothing for other models in the same environment. The functions here only
choose; what they choose is imported when it is needed.
"""

import sys
from collections.abc import Callable

from dspark import arguments, seams
from dspark.errors import UsageError

_registered = False


def resolve_arguments(original, server_args):
    """ServerArgs.__post_init__: our refusals and defaults, then SGLang's own resolution."""
    arguments.resolve(original, server_args)


def check_request(original, manager, obj, input_ids):
    """TokenizerManager._validate_one_request checks lengths only."""
    from sglang.srt.configs.model_config import is_deepseek_v4

    if is_deepseek_v4(manager.model_config.hf_config):
        from dspark.request_checks import check_request

        check_request(obj, input_ids, manager.model_config.vocab_size)
    return original(manager, obj, input_ids)


def allow_dspark_on_cpu(original, server_args):
    """_handle_dspark refuses every device but CUDA; its other checks hold on the CPU too."""
    if server_args.device != "cpu" or not arguments.is_deepseek_v4(server_args):
        return original(server_args)
    server_args.device = "cuda"
    try:
        return original(server_args)
    finally:
        server_args.device = "cpu"


def build_kv_pool(original, configurator, **kwargs):
    if not kwargs["is_dsv4_model"]:
        return original(configurator, **kwargs)
    from dspark.pools import build_kv_pool

    return build_kv_pool(
        configurator, sizes=kwargs["sizes"], req_to_token_pool=kwargs["req_to_token_pool"]
    )


def build_allocator(original, configurator, **kwargs):
    # A draft runner brings the target's allocator along and only shares its mapping.
    if not kwargs["is_dsv4_model"] or kwargs["token_to_kv_pool_allocator"] is not None:
        return original(configurator, **kwargs)
    from dspark.allocator import build_allocator

    return build_allocator(
        configurator, sizes=kwargs["sizes"], token_to_kv_pool=kwargs["token_to_kv_pool"]
    )


def make_pool_configurator(original, kvc):
    from sglang.srt.configs.model_config import is_deepseek_v4

    if not is_deepseek_v4(kvc.model_config.hf_config):
        return original(kvc)
    from dspark.pools import DSparkPoolConfigurator

    return DSparkPoolConfigurator(kvc)


def choose_worker(original, algorithm, server_args):
    if not (algorithm.is_dspark() and arguments.is_deepseek_v4(server_args)):
        return original(algorithm, server_args)
    from dspark.worker import DSparkWorker

    return DSparkWorker


def without_triton_on_cpu(original, backend):
    from sglang.srt.utils import is_cpu

    return False if is_cpu() and backend == seams.ATTENTION_BACKEND else original(backend)


def last_slot_in_torch(original, req_to_token, req_pool_indices_tensor, prefix_lens_tensor):
    from sglang.srt.mem_cache.allocation import get_last_loc_torch
    from sglang.srt.runtime_context import get_exec

    ours = get_exec().kernel.attention_backend == seams.ATTENTION_BACKEND
    choose = get_last_loc_torch if ours and req_to_token.device.type == "cpu" else original
    return choose(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


def bonus_tokens_without_stream(original, future_map, batch):
    """The stock code records a CUDA stream on the index tensor; a CPU tensor has none."""
    draft = batch.spec_info
    if not future_map.spec_algo.is_dspark() or str(future_map.device) != "cpu" or draft is None:
        return original(future_map, batch)
    if draft.future_indices.shape[0]:
        draft.bonus_tokens = future_map.output_tokens_buf[draft.future_indices]
    return None


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


def count_penalties_later(original, batch):
    if batch.enable_overlap and is_ours():
        return None  # counted by count_penalties_at_forward
    return original(batch)


def count_penalties_at_forward(original, scheduler, batch, overlap):
    if overlap and is_ours():
        from dspark.target_penalties import count_token_in_flight

        count_token_in_flight(batch)
    return original(scheduler, batch, overlap=overlap)


def penalise_in_order(original, orchestrator, logits, repeat=None):
    if repeat is not None or not is_ours():
        return original(orchestrator, logits, repeat)
    from dspark.target_penalties import apply_in_order

    return apply_in_order(orchestrator, logits)


def check_draft_request(original, req, enable_overlap):
    """SGLang refuses log probabilities for this family of drafts; our worker returns them."""
    if not is_ours():
        return original(req, enable_overlap)
    if req.return_hidden_states:
        return "DSpark returns no hidden states; ask a server without --speculative-algorithm."
    return None


def finish_in_token_order(original, req, new_accepted_len=1):
    """SGLang tests the length limit first, and so misses a stop inside the last accepted run."""
    if not is_ours():
        return original(req, new_accepted_len)
    from dspark.finish import update_finish_state

    return update_finish_state(original, req, new_accepted_len)


def add_dspark_section(original, scheduler, recv_req):
    output = original(scheduler, recv_req)
    section = output.internal_state.pop("dspark_info_record", None)
    if section is not None:
        output.internal_state["dspark"] = section
    return output


def mask_without_pinned_memory(original, vocab_size, batch_size):
    """SGLang allocates grammar masks in pinned memory, which needs an accelerator."""
    from sglang.srt.utils import is_cpu

    if not is_cpu():
        return original(vocab_size, batch_size)
    import torch
    from xgrammar import bitmask_dtype, get_bitmask_shape

    return torch.full(get_bitmask_shape(batch_size, vocab_size), -1, dtype=bitmask_dtype)


def mask_logits_on_cpu(original, grammar, logits, vocab_mask):
    """SGLang masks on accelerators only; xgrammar brings the loop for the CPU."""
    if logits.device.type != "cpu":
        return original(grammar, logits, vocab_mask)
    from xgrammar import apply_token_bitmask_inplace

    return apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")


def keep_head_counts(original, model_config, load_config, tp_size):
    """SGLang pads head counts for its AMX kernels on the CPU; our weights would no longer fit."""
    from sglang.srt.configs.model_config import is_deepseek_v4

    if is_deepseek_v4(model_config.hf_config):
        return model_config
    return original(model_config, load_config, tp_size)


def decode_between_chunks(original, scheduler, running_batch):
    """SGLang runs all chunks of a long prompt before the next decode step."""
    if is_ours():
        from sglang.srt.managers.schedule_batch import NextBatchPlan

        from dspark.decode_turn import is_due

        if is_due(scheduler, running_batch):
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
    return original(scheduler, running_batch)


def check_state_when_idle(original, scheduler):
    """SGLang checks its own pools for leaks here; the compress state follows."""
    original(scheduler)
    from dspark.pools import DSparkKVPool

    pool = scheduler.tp_worker.model_runner.token_to_kv_pool
    if isinstance(pool, DSparkKVPool) and scheduler.is_fully_idle():
        pool.state.check_when_idle()


def make_backend(runner):
    """Attention backend of the target or draft runner; the worker checks itself here too."""
    check_worker()
    from dspark.backend import make_backend

    return make_backend(runner)


HOOKS: dict[str, Callable] = {
    "server_args.ServerArgs.__post_init__": resolve_arguments,
    "managers.tokenizer_manager.TokenizerManager._validate_one_request": check_request,
    "arg_groups.speculative_hook._handle_dspark": allow_dspark_on_cpu,
    f"{seams.KVC}._build_token_to_kv_pool": build_kv_pool,
    f"{seams.KVC}._build_token_to_kv_pool_allocator": build_allocator,
    "model_executor.pool_configurator.create_memory_pool_configurator": make_pool_configurator,
    "speculative.spec_info.SpeculativeAlgorithm.create_worker": choose_worker,
    "utils.common.support_triton": without_triton_on_cpu,
    "mem_cache.allocation.get_last_loc": last_slot_in_torch,
    "managers.overlap_utils.FutureMap._resolve_spec_extras": bonus_tokens_without_stream,
    "configs.update_config.adjust_config_with_unaligned_cpu_tp": keep_head_counts,
    "mem_cache.allocation_sizing.get_alloc_len_per_decode": reserve_draft_block,
    "speculative.spec_info.SpeculativeAlgorithm.get_num_tokens_per_req_for_target_verify": (
        draft_at_trained_width
    ),
    "managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens": count_penalties_later,
    "managers.scheduler.Scheduler._forward_isolation": count_penalties_at_forward,
    "sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.apply": penalise_in_order,
    "speculative.dflash_utils.validate_dflash_request": check_draft_request,
    "managers.schedule_batch.Req.update_finish_state": finish_in_token_order,
    "managers.scheduler.Scheduler.get_internal_state": add_dspark_section,
    "managers.scheduler.Scheduler.on_idle": check_state_when_idle,
    "managers.scheduler.Scheduler.get_new_batch_prefill": decode_between_chunks,
    "constrained.xgrammar_backend._allocate_token_bitmask": mask_without_pinned_memory,
    "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask": mask_logits_on_cpu,
}


def refuse_model(sentence: str) -> None:
    """Leave SGLang as it is, but stop it from serving DeepSeek-V4 with its stock classes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def stop(server_args):
        if arguments.is_deepseek_v4(server_args):
            raise UsageError(sentence)

    HookRegistry.register("sglang.srt.server_args.ServerArgs.__post_init__", stop, HookType.BEFORE)


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`; SGLang calls it once in every process.

    SGLang logs what this raises and goes on without us. Hence the model class is named before
    anything can fail: where it is built in a worker, it stops (`check_worker`).
    """
    global _registered
    seams.name_models()
    if fault := seams.find_version_fault():
        refuse_model(fault)
    else:
        try:
            put_in_place()
        except Exception as error:
            refuse_model(f"this plugin could not be set up ({error}); reinstall SGLang.")
            raise
    _registered = True


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

    for target, hook in HOOKS.items():
        HookRegistry.register(f"sglang.srt.{target}", hook, HookType.AROUND)
    ATTENTION_BACKENDS[seams.ATTENTION_BACKEND] = make_backend


def registered() -> bool:
    """Whether SGLang has called `register` in this process, and it came to its end."""
    return _registered


def check_worker() -> None:
    """Raise seams.HookLost in a worker process where stock code would run instead of ours."""
    if not _registered:
        raise seams.HookLost(
            "this plugin was not set up in the worker process; the log above says why."
        )
    seams.require_active(HOOKS.items(), make_backend)
