"""Set up every test process as `dspark serve` sets up its own: stand-ins before SGLang."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from dspark.standins import install_if_cpu

install_if_cpu()
