"""Set up every test process as `dspark serve` sets up its own: stand-ins before SGLang."""

import argparse
import os
from pathlib import Path

import hypothesis
import pytest
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

# Files whose tests ask the same two servers: a process of its own starts them once.
SHARE_A_PAIR = {
    f"test_{name}"
    for name in (
        "control",
        "dspark_ends",
        "dspark_identity",
        "dspark_requests",
        "dspark_seeds",
        "requests_fuzz",
        "requests_refused",
    )
}


def pytest_collection_modifyitems(items):
    """Tests of one file stay in one of several processes (`--dist loadgroup`), and share there."""
    for item in items:
        file = Path(item.path)
        group = "a pair of servers" if file.stem in SHARE_A_PAIR else str(file)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def server_flags():
    """SGLang's parser with this package's flags, as `dspark serve` has it."""
    from sglang.srt.server_args import ServerArgs

    from dspark import options

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    if "--dspark-verify" not in parser._option_string_actions:  # where no plugin is loaded
        options.add_flags(parser)
    return parser
