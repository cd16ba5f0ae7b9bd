"""SGLang's own allocators and pools, importable on a machine without a GPU."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for the `simulation` package


@pytest.fixture(scope="session")
def import_sglang():
    """importlib.import_module, after making SGLang importable here; skips where it is absent."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    if not torch.cuda.is_available():
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    from dspark.standins import install_if_cpu

    install_if_cpu()
    return importlib.import_module
