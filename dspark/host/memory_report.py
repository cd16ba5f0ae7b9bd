"""The budget of a worker whose weights are loaded, and what `/server_info` says of memory."""

import logging
from typing import Any, NamedTuple

import torch
from sglang.srt.distributed import get_world_group
from sglang.srt.utils import get_available_gpu_memory
from torch import distributed as dist

from dspark.errors import UsageError
from dspark.host import memory_budget, memory_flags
from dspark.host.draft_checkpoint import with_draft
from dspark.host.memory_budget import GIB, MIN_TOKENS, Budget, Load, Weights
from dspark.target.caches import PAGE_TOKENS
from dspark.target.config import ModelConfig

logger = logging.getLogger(__name__)


class MemoryReport(NamedTuple):
    load: Load
    budget: Budget
    available: int | None  # bytes of one card for everything in the budget; None on a CPU
    more: list[str]  # changes of flags that would enlarge the pool


def measure(configurator) -> MemoryReport:
    """Divide what the loaded weights leave, and print the table.

    configurator: SGLang's KVCacheConfigurator of the target runner.

    Raises:
        UsageError: the pool that was asked for does not fit, or none does.
    """
    args, model_config = configurator.server_args, configurator.model_config
    config = with_draft(ModelConfig.from_hf(model_config.hf_config), args)
    load = load_of(args, config, model_config.context_len)
    weights = held_weights(configurator.model, load, configurator.device)
    available = available_bytes(configurator, weights)
    if available is None:
        pages, more = args.max_total_tokens // PAGE_TOKENS, []
    else:
        static = static_bytes(args)
        # A pool that was not given leaves room for what torch reserves beyond what it uses.
        free = available - (0 if args.max_total_tokens else memory_budget.FRAGMENTS)
        most = memory_budget.most_pages(load, weights, free, static)
        pages = choose_pages(args.max_total_tokens, most, memory_budget.useful_pages(load))
        more = memory_budget.what_gives_more(load, weights, free, static)
    budget = memory_budget.budget(load, weights, pages)
    if configurator.ps.tp_rank == 0:
        logger.info(memory_budget.table(budget, load, more))
    return MemoryReport(load, budget, available, more)


def load_of(args, config: ModelConfig, context: int) -> Load:
    """What the resolved flags ask for."""
    on_cpu = args.device == "cpu"
    rows = memory_flags.given_prompt_rows(args, config)
    assert rows is not None  # resolved flags name a chunk
    return Load(
        config,
        tp=args.tp_size,
        verify_width=args.speculative_num_draft_tokens or 1,
        requests=args.max_running_requests,
        context=context,
        prompt_rows=rows,
        window_ratio=args.swa_full_tokens_ratio,
        graphs=not on_cpu and memory_flags.captures(args),
    )


def held_weights(model, load: Load, device: str) -> Weights:
    """Bytes of the weights of this rank: as allocated, or on a CPU as in the checkpoint."""
    if device == "cpu":
        return memory_budget.checkpoint_weights(load.config, load.tp, load.stages > 0)
    target = tensor_bytes(model.weights)
    return Weights(target, torch.cuda.memory_allocated() - target)


def tensor_bytes(tree: Any) -> int:
    """Bytes of all tensors in nested tuples and lists."""
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    return sum(map(tensor_bytes, tree)) if isinstance(tree, tuple | list) else 0


def available_bytes(configurator, weights: Weights) -> int | None:
    """Bytes that the budget divides, weights included: the least of all ranks."""
    if configurator.device == "cpu":
        card = memory_flags.card_bytes(configurator.server_args, on_cpu=True)
        return None if card is None else card - memory_budget.CONTEXT_LEAST
    free = int(get_available_gpu_memory(configurator.device, configurator.gpu_id) * GIB)
    # Pieces that loading has left in torch's hands are not lost: what comes next fills them.
    left = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    least = torch.tensor(free + left)
    world = get_world_group()
    if world.world_size > 1:
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=world.cpu_group)
    return int(least) + weights.target + weights.draft


def static_bytes(args) -> int | None:
    """Bound of weights and pools together, where the user gave one."""
    card = memory_flags.card_bytes(args, on_cpu=args.device == "cpu")
    if card is None or args.mem_fraction_static == memory_flags.NO_BOUND:
        return None
    return int(card * args.mem_fraction_static)


def choose_pages(tokens: int | None, most: int, useful: int) -> int:
    """Pages of the full pool: as many as were asked for, or of those that fit all that are useful.

    Raises:
        UsageError: they do not fit.
    """
    pages = min(most, useful) if tokens is None else tokens // PAGE_TOKENS
    if pages > most or pages * PAGE_TOKENS < MIN_TOKENS:
        raise UsageError(
            f"The weights leave room for a pool of {most * PAGE_TOKENS} tokens, but "
            f"{max(pages * PAGE_TOKENS, MIN_TOKENS)} are needed; give fewer requests "
            "(--max-running-requests), a shorter context (--context-length) or smaller chunks "
            "(--chunked-prefill-size)."
        )
    return pages


def section(report: MemoryReport) -> dict[str, Any]:
    """`dspark.memory` of `/server_info`; bytes of one card."""
    load = report.load
    found: dict[str, Any] = {
        "planned": report.budget._asdict() | {"total": report.budget.total},
        "requests": load.requests,
        "context": load.context,
        "prompt_rows": load.prompt_rows,
        "available": report.available,
        "gives_more": report.more,
    }
    if torch.cuda.is_initialized():
        free, _ = torch.cuda.mem_get_info()
        found["measured"] = {
            "allocated": torch.cuda.memory_allocated(),
            "most_allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "most_reserved": torch.cuda.max_memory_reserved(),
            "card_free": free,
        }
    return found
