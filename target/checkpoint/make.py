"""`dspark make-checkpoint`: write a random checkpoint in the official format."""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from dspark.target.checkpoint.names import checkpoint_tensors
from dspark.target.checkpoint.presets import PRESETS
from dspark.target.checkpoint.random_weights import Recipe, random_tensor
from dspark.target.checkpoint.tokenizer import write_tokenizer
from dspark.target.checkpoint.writer import SHARD_BYTES, Written, write_checkpoint
from dspark.target.config import ModelConfig

# Strength of attention and experts, by how often the draft agrees with the target.
ACCEPTANCE = {"high": 0.15, "medium": 0.3, "low": 0.6, "none": 1.0}
TINY_SHARD_BYTES = 2 << 20


def make_checkpoint(
    directory: str | Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    alpha: float = ACCEPTANCE["high"],
    shard_bytes: int = SHARD_BYTES,
) -> Written:
    """Write config, tokenizer and random weights; the same arguments give the same bytes.

    The directory appears only when it is complete, so its existence means it can be used.

    Args:
        config: `config.json` content, e.g. from `presets`.
        alpha: see `random_weights`.

    Raises:
        ConfigError: a configuration this package does not serve.
        FileExistsError: the directory exists and is not empty.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is not an empty directory.")
    model = ModelConfig.from_hf(config)
    recipe = Recipe(seed, alpha)
    table = checkpoint_tensors(model)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_tokenizer(partial, model.vocab_size, model.max_position_embeddings)
        written = write_checkpoint(
            partial,
            table,
            lambda name, spec: random_tensor(name, spec, model, recipe),
            shard_bytes,
        )
        partial.chmod(0o755)
        partial.replace(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return written


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    shard_bytes = TINY_SHARD_BYTES if arguments.config.startswith("tiny") else SHARD_BYTES
    try:
        written = make_checkpoint(
            arguments.directory,
            PRESETS[arguments.config](),
            seed=arguments.seed,
            alpha=ACCEPTANCE[arguments.acceptance],
            shard_bytes=shard_bytes,
        )
    except (OSError, ValueError) as error:
        print(f"dspark make-checkpoint: {error}", file=sys.stderr)
        return 1
    print(
        f"{arguments.directory}: {arguments.config}, {written.tensors} tensors, "
        f"{written.nbytes / 2**20:.1f} MiB in {len(written.shards)} shards."
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dspark make-checkpoint",
        description="Write a random DeepSeek-V4 checkpoint with a DSpark draft, "
        "in the official format.",
    )
    parser.add_argument("directory", help="created; must not exist or must be empty")
    parser.add_argument("--config", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--acceptance",
        choices=list(ACCEPTANCE),
        default="high",
        help="how often the target accepts drafted tokens; 'none' makes every layer count fully "
        "and suits comparisons of logits",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
