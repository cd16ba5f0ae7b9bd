"""Set up every test process as `dspark serve` sets up its own: stand-ins before SGLang."""

import os

import hypothesis
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from dspark.standins import install_if_cpu

install_if_cpu()

# How long an example takes says nothing on a machine that does other things as well.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

if torch.cuda.is_available() and os.environ.get("DSPARK_TEST_SM89") == "1":
    from dspark.kernels.tooling import sm89_on_sm90

    # Before any kernel is compiled: a process that has code of both kinds mixes them up.
    sm89_on_sm90.install()
