"""Makes SGLang importable in this process where there is no GPU."""

import os

import torch

from dspark.standins import CPU_ENGINE, install_if_cpu

if not torch.cuda.is_available():
    os.environ.setdefault(CPU_ENGINE, "1")
    install_if_cpu()
