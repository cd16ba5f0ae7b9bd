from pathlib import Path

import pytest

from dspark.target.checkpoint import presets
from dspark.target.checkpoint.make import make_checkpoint


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory) -> Path:
    """TINY in about a dozen shards; only the last few hold the draft."""
    directory = tmp_path_factory.mktemp("checkpoints") / "tiny"
    make_checkpoint(directory, presets.tiny(), shard_bytes=1 << 20)
    return directory
