"""Memory flags of a DeepSeek-V4 server: what the cards hold decides those that were left out."""

import os
import subprocess
import sys
from collections.abc import Iterator

from dspark.errors import UsageError
from dspark.host import memory_budget
from dspark.host.memory_budget import BudgetError, Card, Load, Wishes
from dspark.target.caches import PAGE_TOKENS
from dspark.target.config import ModelConfig

CARD_BYTES = "DSPARK_CARD_BYTES"
NO_BOUND = 0.999  # of --mem-fraction-static where it was not given: pools go by the budget
WINDOW_RATIO = 0.05  # spare window pages for reusable prefixes, where no share was given


def card_bytes(server_args, on_cpu: bool) -> int | None:
    """Bytes that the server may take of each card; None on a CPU where no number was given.

    Raises:
        UsageError: the variable is no positive number.
    """
    said = os.environ.get(CARD_BYTES)
    if said is None:
        return None if on_cpu else min(free_bytes(server_args))
    if not said.isdecimal() or not int(said):
        raise UsageError(f"{CARD_BYTES}={said} must be a number of bytes.")
    return int(said)


def free_bytes(server_args) -> Iterator[int]:
    """Free bytes of each rank's card on this machine."""
    for rank in range(server_args.tp_size // server_args.nnodes):
        yield free_bytes_of(server_args.base_gpu_id + rank * server_args.gpu_id_step)


def free_bytes_of(card: int) -> int:
    """Ask the driver, or where its tool is missing a process that ends again.

    This process must not: it would hold memory of every card for as long as it lives.

    Raises:
        UsageError: neither answers.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[card].strip() if card < len(visible) and visible[card] else str(card)
    query = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "-i", name)
    if (mebibytes := first_number(query)) is not None:
        return mebibytes * memory_budget.MIB
    ask = f"import torch; print(torch.cuda.mem_get_info({card})[0])"
    if (found := first_number((sys.executable, "-c", ask))) is not None:
        return found
    raise UsageError(
        f"Neither nvidia-smi nor torch says how much memory is free on card {card}; "
        f"set {CARD_BYTES} to the bytes that the server may take of each card."
    )


def first_number(command: tuple[str, ...]) -> int | None:
    """The number that a command prints; None where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return int(done.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def verify_width(server_args, config: ModelConfig) -> int:
    """Rows of a request in a decode step, before SGLang has resolved the flags."""
    if server_args.speculative_algorithm is None:
        return 1
    block = config.dspark.block_size if config.dspark else 0
    return 1 + (server_args.speculative_dspark_block_size or block)


def refuse_uneven_tokens(server_args) -> None:
    """Raise UsageError for a pool that does not consist of whole pages."""
    tokens = server_args.max_total_tokens
    if tokens is not None and tokens % PAGE_TOKENS:
        below = tokens // PAGE_TOKENS * PAGE_TOKENS
        raise UsageError(
            f"--max-total-tokens {tokens} must be a multiple of the cache page of {PAGE_TOKENS} "
            f"tokens, such as {below} or {below + PAGE_TOKENS}."
        )


def refuse_long_context(server_args, config: ModelConfig) -> None:
    """Raise UsageError for a context beyond the positions that the model knows."""
    context, known = server_args.context_length, config.max_position_embeddings
    if context is not None and context > known:
        raise UsageError(
            f"--context-length {context} is longer than the {known} tokens that the model was "
            "trained for (max_position_embeddings)."
        )


def fill(server_args, config: ModelConfig, free: int) -> None:
    """Set the flags that were left out to what fits `free` bytes of each card.

    Raises:
        UsageError: what was given does not fit; one sentence with numbers.
    """
    rows = verify_width(server_args, config)
    if server_args.swa_full_tokens_ratio == type(server_args).swa_full_tokens_ratio:
        server_args.swa_full_tokens_ratio = WINDOW_RATIO
    load = Load(
        config,
        server_args.tp_size,
        rows,
        requests=1,
        context=1,
        prompt_rows=1,
        window_ratio=server_args.swa_full_tokens_ratio,
        graphs=captures(server_args),
    )
    weights = memory_budget.checkpoint_weights(config, server_args.tp_size, load.stages > 0)
    wishes = Wishes(
        requests=server_args.max_running_requests,
        context=server_args.context_length,
        prompt_rows=given_prompt_rows(server_args, config),
        tokens=server_args.max_total_tokens,
    )
    if (server_args.chunked_prefill_size or 0) < 0 and wishes.context is None:
        # A prompt runs as a whole: none may be longer than what the workspace was sized for.
        wishes = wishes._replace(context=wishes.prompt_rows)
    try:
        chosen = memory_budget.plan(
            Card(free, server_args.mem_fraction_static), weights, load, wishes
        )
    except BudgetError as error:
        raise UsageError(str(error)) from None
    server_args.max_running_requests = chosen.load.requests
    server_args.context_length = chosen.load.context
    if server_args.chunked_prefill_size is None:
        server_args.chunked_prefill_size = chosen.load.prompt_rows
    if server_args.mem_fraction_static is None:
        server_args.mem_fraction_static = NO_BOUND
    os.environ.setdefault(CARD_BYTES, str(free))


def captures(server_args) -> bool:
    """Whether decode steps are captured as CUDA graphs."""
    backend = server_args.cuda_graph_backend_decode
    if backend is not None:
        return backend != "disabled"
    return not (server_args.disable_cuda_graph or server_args.disable_decode_cuda_graph)


def given_prompt_rows(server_args, config: ModelConfig) -> int | None:
    """Most rows of a prompt batch, where the flags say; None leaves the chunk to the budget."""
    chunk = server_args.chunked_prefill_size
    if chunk is None or chunk > 0:
        return chunk
    # Without chunks a batch ends before `max_prefill_tokens`, unless one prompt is longer.
    longest = server_args.context_length or 0
    return max(longest, min(server_args.max_prefill_tokens, config.max_position_embeddings))
