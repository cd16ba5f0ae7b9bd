"""Server flags of a DeepSeek-V4 model: what is refused, what is filled in, what is checked.

`resolve` runs around SGLang's own argument resolution, in the launcher, before any process
starts. A model of another family passes through untouched.
"""

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from dspark import options
from dspark.errors import UsageError
from dspark.host import (
    capabilities,
    config_file,
    memory_flags,
    start_log,
    step_measure,
    tuned,
    warm_up,
)
from dspark.host.config_file import ARCHITECTURE, read_config
from dspark.host.draft_checkpoint import has_own_directory, with_draft
from dspark.speculation.settings import Settings
from dspark.target.caches import PAGE_TOKENS
from dspark.target.checkpoint.preflight import check_headers
from dspark.target.checkpoint.reader import CheckpointError
from dspark.target.config import ConfigError, ModelConfig
from dspark.target.sharding import check_tp

MIN_POOL_TOKENS = 2 * PAGE_TOKENS
LONGEST_BLOCK = 8  # drafts of a step: `compress.rows_fit_ring` of one row more, with a ring of 16
ALLOW_ANY_GPU = "DSPARK_ALLOW_ANY_GPU"  # for tests on a GPU that is refused


class Unserved(NamedTuple):
    fields: tuple[str, ...]  # of ServerArgs; using one means a value other than its default
    what: str  # completes "... does not serve <what>"


UNSERVED = (
    Unserved(("enable_lora", "lora_paths", "lora_target_modules"), "LoRA adapters"),
    Unserved(("dp_size", "enable_dp_attention", "enable_dp_lm_head"), "data parallelism"),
    Unserved(("pp_size",), "pipeline parallelism"),
    Unserved(
        ("attn_cp_size", "dcp_size", "enable_prefill_cp", "enable_dsa_prefill_context_parallel"),
        "context parallelism",
    ),
    Unserved(
        ("ep_size", "moe_a2a_backend", "moe_dp_size", "dwdp_size", "enable_eplb"),
        "expert parallelism",
    ),
    Unserved(
        ("disaggregation_mode", "enable_pdmux", "encoder_only", "language_only"),
        "disaggregated prefill and decode",
    ),
    Unserved(
        (
            "enable_hierarchical_cache",
            "hicache_storage_backend",
            "enable_lmcache",
            "enable_flexkv",
            "enable_hisparse",
            "radix_cache_backend",
            "cpu_offload_gb",
            "offload_group_size",
        ),
        "a host tier for the cache or the weights",
    ),
    Unserved(("enable_multimodal", "mm_attention_backend"), "multimodal input"),
    Unserved(("is_embedding", "dllm_algorithm"), "anything but causal generation"),
    Unserved(
        ("disable_hybrid_swa_memory", "enable_page_major_kv_layout", "enable_unified_memory"),
        "another memory layout than its own window and full pools",
    ),
    Unserved(
        ("prefill_only_disable_kv_cache", "enable_streaming_session", "enable_session_radix_cache"),
        "requests without an ordinary cache",
    ),
    Unserved(("enable_memory_saver",), "pausing: its weights and pools stay where they are"),
    Unserved(
        ("enable_two_batch_overlap", "enable_single_batch_overlap", "enable_mixed_chunk"),
        "batches that mix prefill and decode",
    ),
    Unserved(("enable_torch_compile", "torchao_config"), "compiled or re-quantised models"),
    Unserved(("enable_deepseek_v4_fp4_indexer",), "an FP4 indexer"),
    Unserved(
        ("enable_return_routed_experts", "enable_return_indexer_topk"),
        "returning routed experts or indexer choices",
    ),
    Unserved(
        ("enable_multi_layer_eagle", "speculative_adaptive", "speculative_token_map"),
        "EAGLE drafting",
    ),
    Unserved(
        ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"),
        "drafts that are accepted against the target's choice",
    ),
    Unserved(
        (
            "speculative_dspark_sps_table_path",
            "speculative_dspark_confidence_sts_path",
            "speculative_dspark_align_verify_tokens_to_graph_tier",
        ),
        "SGLang's own choice of what is verified (see --dspark-verify, --dspark-step-cost and "
        "--dspark-calibration)",
    ),
    Unserved(("decoupled_spec_role",), "a decoupled draft server"),
    Unserved(("use_ray",), "Ray workers"),
    # SGLang loads no plugin in their processes, so that nobody would check requests there.
    Unserved(("tokenizer_worker_num",), "several tokenizer processes"),
)


class Fixed(NamedTuple):
    field: str
    allowed: tuple[Any, ...]
    why: str


FIXED = (
    Fixed("kv_cache_dtype", ("auto", "fp8_e4m3"), "its cache is FP8 with bf16 rotary parts"),
    Fixed("dtype", ("auto", "bfloat16"), "its activations are bfloat16"),
    Fixed("quantization", (None, "fp8"), "the checkpoint fixes the quantisation"),
    Fixed("page_size", (None, PAGE_TOKENS), "its cache pages hold 256 tokens"),
    Fixed("attention_backend", (None, "dsv4"), "it brings its own attention"),
    Fixed("prefill_attention_backend", (None, "dsv4"), "it brings its own attention"),
    Fixed("decode_attention_backend", (None, "dsv4"), "it brings its own attention"),
    Fixed("moe_runner_backend", ("auto", "marlin"), "it brings its own expert kernels"),
    Fixed("load_format", ("auto", "safetensors"), "it reads the official checkpoint format"),
    Fixed("model_impl", ("auto", "sglang"), "it brings its own model"),
)

REASONING_PARSER, TOOL_CALL_PARSER = "deepseek-v4", "deepseekv4"  # SGLang's names for this model

UNSERVED_ENVIRONMENT = {
    "SGLANG_OPT_USE_ONLINE_COMPRESS": "online C128 compression, which cannot be rolled back",
    "SGLANG_EXPERIMENTAL_ONLINE_C128_MTP": "online C128 compression, which cannot be rolled back",
}


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def is_deepseek_v4(server_args) -> bool:
    return config_file.is_deepseek_v4(server_args.model_path, server_args.revision)


def refuse_sibling(server_args) -> None:
    """A DeepSeek-V4 configuration under another class name is ours to refuse by name."""
    config = read_config(server_args.model_path, server_args.revision)
    if config.get("model_type") == "deepseek_v4":
        raise UsageError(
            f"config.json names the architecture {config.get('architectures')}, but only "
            f"['{ARCHITECTURE}'] is served."
        )


def resolve(original, server_args) -> None:
    """Around ServerArgs.__post_init__.

    Raises:
        UsageError: one sentence naming the flag or checkpoint field that cannot be served.
    """
    if not is_deepseek_v4(server_args):
        refuse_sibling(server_args)
        original(server_args)
        return
    start_log.leave_out_what_is_untrue(lambda: True)
    if server_args.speculative_algorithm is not None:
        server_args.speculative_algorithm = server_args.speculative_algorithm.upper()
    config = with_draft(checkpoint_config(server_args), server_args)
    refuse(server_args, config)
    check_shards(server_args, config)
    on_cpu = uses_cpu(server_args)
    fill_defaults(server_args, config, on_cpu)
    replace_marlin(server_args)
    warm_up.register()
    if not on_cpu:  # a CPU compiles nothing
        warm_up.ask_for(server_args)
    step_measure.ask_for(server_args)
    original(server_args)


def checkpoint_config(server_args) -> ModelConfig:
    try:
        if os.path.isdir(server_args.model_path):
            config = ModelConfig.from_checkpoint(server_args.model_path)
        else:
            config = ModelConfig.from_hf(read_config(server_args.model_path, server_args.revision))
        check_tp(config, server_args.tp_size)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    return config


def check_shards(server_args, config: ModelConfig) -> None:
    """Refuse a damaged checkpoint here, in one sentence, rather than from a worker's traceback.

    What has not been downloaded yet is left to the loader, which checks every tensor again.
    """
    elsewhere = has_own_directory(server_args)
    bundled = server_args.speculative_algorithm is not None and not elsewhere
    try:
        if os.path.isdir(server_args.model_path):
            check_headers(server_args.model_path, config, target=True, draft=bundled)
        if elsewhere and os.path.isdir(server_args.speculative_draft_model_path):
            path = server_args.speculative_draft_model_path
            check_headers(path, config, target=False, draft=True)
    except (CheckpointError, ConfigError) as error:
        raise UsageError(str(error)) from None


def replace_marlin(server_args) -> None:
    """Say what runs in place of Marlin, which existing command lines ask for."""
    if server_args.moe_runner_backend == "marlin":
        server_args.moe_runner_backend = "auto"
        print(
            "dspark: --moe-runner-backend marlin: the experts run in this package's own MXFP4 "
            "kernel instead, because Marlin's sums of a row depend on the other rows of its batch.",
            file=sys.stderr,
            flush=True,
        )


def uses_cpu(server_args) -> bool:
    from sglang.srt.utils import get_device

    return (server_args.device or get_device()).startswith("cpu")


def refuse(server_args, config: ModelConfig) -> None:
    """Raise UsageError for the first flag, variable or device that is not served."""
    for unserved in UNSERVED:
        for field in unserved.fields:
            refuse_unserved(server_args, field, unserved.what)
    for field, allowed, why in FIXED:
        value = getattr(server_args, field)
        if value not in allowed:
            raise UsageError(
                f"{flag(field)} {value} cannot be used with DeepSeek-V4: {why} "
                f"(leave the flag out)."
            )
    for name, what in UNSERVED_ENVIRONMENT.items():
        if os.environ.get(name, "0").lower() in ("1", "true", "yes"):
            raise UsageError(f"{name} is set, but sglang-dspark does not serve {what}.")
    refuse_sizes(server_args)
    memory_flags.refuse_long_context(server_args, config)
    refuse_speculation(server_args, config)
    tuned.files()  # a bad path should stop the launcher, not a worker
    if not uses_cpu(server_args):
        refuse_gpu()


def refuse_unserved(server_args, field: str, what: str) -> None:
    value = getattr(server_args, field)
    # A few list flags have no class-level default; they are unused when empty.
    default = getattr(type(server_args), field, None)
    if value != default and value:
        raise UsageError(f"{flag(field)}: sglang-dspark does not serve {what}.")


def refuse_sizes(server_args) -> None:
    context = server_args.context_length
    if context is not None and context < 1:
        raise UsageError(f"--context-length {context} must be at least 1.")
    chunk = server_args.chunked_prefill_size
    if chunk is not None and chunk > 0 and chunk % PAGE_TOKENS:
        raise UsageError(
            f"--chunked-prefill-size {chunk} must be a multiple of the cache page of "
            f"{PAGE_TOKENS} tokens, or -1 to switch chunking off."
        )
    tokens = server_args.max_total_tokens
    if tokens is not None and tokens < MIN_POOL_TOKENS:
        raise UsageError(
            f"--max-total-tokens {tokens} is less than the {MIN_POOL_TOKENS} tokens that one "
            "request needs."
        )
    memory_flags.refuse_uneven_tokens(server_args)
    requests = server_args.max_running_requests
    if requests is not None and requests < 1:
        raise UsageError(f"--max-running-requests {requests} must be at least 1.")


def refuse_speculation(server_args, config: ModelConfig) -> None:
    algorithm = server_args.speculative_algorithm
    depth = server_args.speculative_dspark_block_size
    if algorithm is None:
        if depth is not None:
            raise UsageError(
                "--speculative-dspark-block-size needs --speculative-algorithm DSPARK."
            )
        if flags := options.draft_flags_given():
            raise UsageError(f"{flags[0]} needs --speculative-algorithm DSPARK.")
        return
    if algorithm != "DSPARK":
        raise UsageError(
            f"--speculative-algorithm {algorithm}: sglang-dspark drafts with DSPARK only."
        )
    if config.dspark is None and server_args.speculative_draft_model_path is None:
        raise UsageError(
            "--speculative-algorithm DSPARK: the checkpoint holds no DSpark draft (config.json "
            "has no dspark_block_size); name one with --speculative-draft-model-path."
        )
    block = config.dspark.block_size if config.dspark else None
    if depth is not None and block is not None and not 1 <= depth <= block:
        raise UsageError(
            f"--speculative-dspark-block-size {depth} contradicts the checkpoint, whose draft "
            f"proposes 1 to {block} tokens."
        )
    rows = server_args.speculative_num_draft_tokens
    wanted = depth or block
    if wanted is not None and wanted > LONGEST_BLOCK:
        raise UsageError(
            f"A draft of {wanted} tokens a step is longer than the {LONGEST_BLOCK} that a verify "
            "step can take back; set --speculative-dspark-block-size."
        )
    if rows is not None and wanted is not None and rows != wanted + 1:
        raise UsageError(
            f"--speculative-num-draft-tokens {rows} must be the draft block plus one, "
            f"{wanted + 1} here (leave the flag out)."
        )
    if block is not None:
        Settings.from_environment(block)  # a bad variable should stop the launcher, not a worker


def refuse_gpu() -> None:
    """Refuse a GPU on which the kernels cannot run; warn of one on which none has run yet.

    Raises:
        UsageError: its compute capability is refused by `capabilities`.
    """
    import torch

    found = torch.cuda.get_device_capability()
    said = capabilities.sentence(found)
    if said is None:
        return
    if capabilities.look_up(found).standing is capabilities.Standing.COMPILED:
        print(f"dspark: {said}; check its outputs.", file=sys.stderr, flush=True)
    elif os.environ.get(ALLOW_ANY_GPU) != "1":
        raise UsageError(
            f"{said}; {capabilities.served()} are served ({ALLOW_ANY_GPU}=1 tries anyway)."
        )


def fill_defaults(server_args, config: ModelConfig, on_cpu: bool) -> None:
    """Give flags that were left out the values that suit this model; never change a given one."""
    free = memory_flags.card_bytes(server_args, on_cpu)
    if free is not None:
        memory_flags.fill(server_args, config, free)
    for field, value in default_flags(config, on_cpu, budgeted=free is not None).items():
        if getattr(server_args, field) is None:
            setattr(server_args, field, value)
    if not on_cpu and server_args.cuda_graph_max_bs_decode is None:
        # Every batch that can run decodes from a graph; SGLang's own limit goes by GPU memory.
        server_args.cuda_graph_max_bs_decode = server_args.max_running_requests
    if not has_tokenizer(server_args):
        server_args.skip_tokenizer_init = True
    if not server_args.skip_tokenizer_init:
        server_args.reasoning_parser = server_args.reasoning_parser or REASONING_PARSER
        server_args.tool_call_parser = server_args.tool_call_parser or TOOL_CALL_PARSER
    if on_cpu:
        server_args.sleep_on_idle = True  # an idle worker would otherwise spin on a core
    for name, value in default_environment(server_args, on_cpu).items():
        os.environ.setdefault(name, value)


def default_flags(config: ModelConfig, on_cpu: bool, budgeted: bool) -> dict[str, Any]:
    """Values of flags that were left out; `budgeted` where the cards' memory has chosen some."""
    # Prefill shapes vary too much to be worth a graph each.
    flags: dict[str, Any] = {"cuda_graph_backend_prefill": "disabled"}
    if not on_cpu:
        return flags
    flags["min_free_slots_delay"] = 1  # admit a request as soon as one slot is free
    if budgeted:
        return flags
    # A request's worst case is its whole context; eight of them must not exhaust a laptop.
    pool = min(8 * config.max_position_embeddings, 64 * 1024)
    return flags | {
        "max_running_requests": 8,
        "max_total_tokens": pool,
        "mem_fraction_static": 0.9,  # no bound in effect: the pools hold `max_total_tokens`
        "chunked_prefill_size": 2 * PAGE_TOKENS,
    }


def has_tokenizer(server_args) -> bool:
    """False only for a local checkpoint without tokenizer files, such as a generated one."""
    path = Path(server_args.tokenizer_path or server_args.model_path)
    if not path.is_dir():
        return True
    return any(
        (path / name).exists()
        for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    )


def default_environment(server_args, on_cpu: bool) -> dict[str, str]:
    variables = {}
    if server_args.speculative_algorithm is not None:
        # In steps, each of which may commit a whole block: the stock 128 would hold back pages.
        variables["SGLANG_SWA_EVICTION_INTERVAL"] = "16"
    if not on_cpu:
        # Our captured graphs read the token tables while they replay; SGLang would otherwise let
        # the scheduler rewrite those as soon as a replay has begun.
        variables["SGLANG_FORCE_COARSE_WAR_BARRIER"] = "1"
    if on_cpu:
        # There is no CUDA state to dump after a crash; waiting for it takes a minute.
        variables["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] = "0"
        variables["SGLANG_PYSPY_DUMP_BEFORE_CRASH"] = "0"
        # Threads that spin between small operations cost ten times the work on a busy machine.
        variables["OMP_WAIT_POLICY"] = "PASSIVE"
    if on_cpu and server_args.tp_size > 1:
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = share_cores(server_args.tp_size)
    return variables


def share_cores(ranks: int) -> str:
    """Deal this process's cores to the ranks: "0,2|1,3"; ranks share when cores are fewer."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::ranks] or [cores[rank % len(cores)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def draft_block_size(server_args) -> int:
    """Rows of a draft block: the width the draft was trained with (resolved arguments)."""
    path = server_args.speculative_draft_model_path or server_args.model_path
    config = read_config(path, server_args.speculative_draft_model_revision)
    return int(config["dspark_block_size"])
