"""Triton kernels run by the interpreter on the CPU: `TRITON_INTERPRET=1 pytest <this folder>`.

Triton reads the variable when a kernel is decorated, so these tests need a process that was
started with it; without it nothing here is collected. With it, public ops dispatch to Triton on
CPU tensors too, and a test compares them with its family's `reference` module:

    got = schedule(...)                  # the kernel
    want = reference.schedule(...)       # kernels/schedule/reference.py

Keep a case at a dozen programs and a few loop trips: about 0.3 s.
"""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from dspark.kernels.tooling import interpreter

    interpreter.install()
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config):
    # The interpreter turns one-element arrays into ints, some hundred times a test.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array:DeprecationWarning")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny arrays: threads only get in each other's way."""
    import torch

    torch.set_num_threads(1)
