"""Where the draft is, and what it is: in the target's directory or in one of its own."""

import os
from dataclasses import fields, replace

from dspark.errors import UsageError
from dspark.host.config_file import read_config
from dspark.target.config import ConfigError, ModelConfig

DRAFT_PATH = "--speculative-draft-model-path"


def has_own_directory(args) -> bool:
    """Whether server arguments, resolved or not, name a draft that is not the target's."""
    wanted = args.speculative_algorithm is not None
    return wanted and args.speculative_draft_model_path not in (None, args.model_path)


def with_draft(config: ModelConfig, args) -> ModelConfig:
    """The target's configuration with that of the draft which will be loaded in `dspark`.

    Raises:
        UsageError: the draft's directory holds no DSpark draft, or one of another model.
    """
    if not has_own_directory(args):
        return config
    path = args.speculative_draft_model_path
    try:
        if os.path.isdir(path):
            draft = ModelConfig.from_checkpoint(path)
        else:
            draft = ModelConfig.from_hf(read_config(path, args.speculative_draft_model_revision))
    except ConfigError as error:
        raise UsageError(f"{DRAFT_PATH} {path}: {error}") from None
    if draft.dspark is None:
        raise UsageError(
            f"{DRAFT_PATH} {path} holds no DSpark draft: config.json has no dspark_block_size."
        )
    for name in (field.name for field in fields(ModelConfig) if field.name != "dspark"):
        ours, its = getattr(config, name), getattr(draft, name)
        if ours != its:
            raise UsageError(
                f"{DRAFT_PATH} {path} was made for another model: it has {name} {its}, "
                f"the target {ours}."
            )
    return replace(config, dspark=draft.dspark)
