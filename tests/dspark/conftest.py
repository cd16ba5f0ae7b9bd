"""Makes SGLang importable in this process where there is no GPU; a checkpoint to point it at."""

import os

import pytest
import torch

from dspark.standins import CPU_ENGINE, install_if_cpu
from dspark.target.checkpoint import presets
from dspark.target.checkpoint.make import make_checkpoint

if not torch.cuda.is_available():
    os.environ.setdefault(CPU_ENGINE, "1")
    install_if_cpu()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """Directory of a complete TINY checkpoint; copy it before changing anything."""
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(directory, presets.tiny(), shard_bytes=2 << 20)
    return directory
