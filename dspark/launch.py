"""`dspark serve`: SGLang's own server, with the device chosen and the plugin loaded first."""

import itertools
import os

from dspark.errors import UsageError
from dspark.standins import CPU_ENGINE, install_if_cpu


def requested_device(argv: list[str]) -> str | None:
    """Value of the last `--device`, written as two words or with `=`; None if absent."""
    device = None
    for word, following in itertools.pairwise([*argv, None]):
        if word == "--device":
            device = following
        elif word and word.startswith("--device="):
            device = word.partition("=")[2]
    return device


def resolve_device(argv: list[str]) -> list[str]:
    """Append `--device cpu` where no device was asked for and there is no CUDA device."""
    if requested_device(argv) is not None:
        return argv
    import torch

    return argv if torch.cuda.is_available() else [*argv, "--device", "cpu"]


def prepare_process(argv: list[str]) -> list[str]:
    """Set this process and its children up for the device; nothing of SGLang is imported yet."""
    argv = resolve_device(argv)
    if requested_device(argv) == "cpu":
        os.environ[CPU_ENGINE] = "1"
        install_if_cpu()
    return argv


def load_plugin() -> None:
    """Load SGLang's plugins and make sure that ours was among them."""
    from sglang.srt.plugins import load_plugins

    from dspark import plugin

    load_plugins()
    if not plugin.registered():
        raise UsageError(
            "SGLang did not load this plugin; reinstall sglang-dspark, and if SGLANG_PLUGINS is "
            "set, add 'dspark' to it."
        )


def main(argv: list[str]) -> None:
    argv = prepare_process(argv)
    load_plugin()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    server_args = prepare_server_args(argv)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
