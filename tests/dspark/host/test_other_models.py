"""A server of another model in the same environment keeps its own Triton."""

import functools
import os
import subprocess
import sys
from types import SimpleNamespace

from dspark.kernels.common import dispatch

IMPORT = """
import os, sys
from dspark.standins import install_if_cpu
install_if_cpu()
import dspark.plugin, dspark.host.models.target, dspark.host.models.draft
print([name for name in sys.argv[1:] if name in os.environ])
"""


def test_importing_the_plugin_leaves_the_compiler_alone():
    clean = {k: v for k, v in os.environ.items() if k not in dispatch.COMPILER_SETTINGS}
    command = [sys.executable, "-c", IMPORT, *dispatch.COMPILER_SETTINGS]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_first_op_on_a_gpu_settles_it(monkeypatch):
    for name in dispatch.COMPILER_SETTINGS:
        monkeypatch.setenv(name, "?")
    anew = functools.cache(dispatch.settle_compiler.__wrapped__)
    monkeypatch.setattr(dispatch, "settle_compiler", anew)
    assert dispatch.use_triton(SimpleNamespace(is_cuda=True))
    assert {name: os.environ[name] for name in dispatch.COMPILER_SETTINGS} == (
        dispatch.COMPILER_SETTINGS
    )
