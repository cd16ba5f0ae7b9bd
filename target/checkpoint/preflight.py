"""Compare shard headers with the configuration before a server spends minutes on loading."""

from pathlib import Path

from dspark.target.checkpoint.ledger import Ledger
from dspark.target.checkpoint.names import (
    DRAFT_PREFIX,
    TensorSpec,
    check_draft,
    draft_tensors,
    target_tensors,
)
from dspark.target.checkpoint.reader import Checkpoint, CheckpointError, read_header, spec_of
from dspark.target.config import ModelConfig


def check_headers(directory: str | Path, config: ModelConfig, target: bool, draft: bool) -> int:
    """Check name, dtype and shape of every tensor, and the length of every shard.

    Args:
        config: what the checkpoint must hold.
        target: whether all but the `mtp.*` tensors will be loaded from it.
        draft: whether the `mtp.*` tensors will be.

    Returns:
        Number of tensors compared.

    Raises:
        CheckpointError: one sentence naming the first tensor or file at fault.
        ConfigError: a draft is wanted and the checkpoint has none.
    """
    checkpoint = Checkpoint(directory)
    present: dict[str, TensorSpec] = {}
    for shard in sorted(set(checkpoint.shard_of.values())):
        for name, entry in read_header(checkpoint.directory / shard).entries.items():
            present[name] = spec_of(entry)
    table = target_tensors(config) if target else {}
    if draft:
        check_draft(config, present)
        table |= draft_tensors(config)
    Ledger(table).expect(n for n in present if (draft if n.startswith(DRAFT_PREFIX) else target))
    for name, spec in table.items():
        if present[name] != spec:
            raise CheckpointError(
                f"Tensor {name} must be {spec.dtype} {list(spec.shape)}, the checkpoint has "
                f"{present[name].dtype} {list(present[name].shape)}."
            )
    return len(table)
