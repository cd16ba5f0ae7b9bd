"""`dspark serve`: SGLang's own server, with the device chosen and the plugin loaded first."""

import itertools
import os

from dspark.errors import UsageError
from dspark.standins import CPU_ENGINE, install_if_cpu


def flag_value(argv: list[str], *flags: str) -> str | None:
    """Last value of a flag, written as two words or with `=`; None if it is absent."""
    value = None
    for word, following in itertools.pairwise([*argv, None]):
        name, equals, given = (word or "").partition("=")
        if name in flags:
            value = given if equals else following
    return value


def check_model_path(argv: list[str]) -> None:
    """Refuse a directory that is not there before SGLang looks for it on the hub."""
    path = flag_value(argv, "--model-path", "--model")
    if path is None and "--config" not in argv and not {"-h", "--help"} & set(argv):
        raise UsageError("--model-path DIRECTORY is needed.")
    if path and path.startswith(("/", "./", "../", "~")) and not os.path.exists(path):
        raise UsageError(f"--model-path {path} does not exist.")


def resolve_device(argv: list[str]) -> list[str]:
    """Append `--device cpu` where no device was asked for and there is no CUDA device."""
    if flag_value(argv, "--device") is not None:
        return argv
    import torch

    return argv if torch.cuda.is_available() else [*argv, "--device", "cpu"]


def cpu_threads(cores: int, ranks: int) -> int:
    """OpenMP threads of one rank: half of the cores are for them, in all.

    The other half runs HTTP, tokenizer and detokenizer. A thread that has to wait for its core
    holds up every operation: with two threads on two cores a step took twice as long as with one.
    """
    return max(1, cores // (2 * ranks))


def prepare_process(argv: list[str]) -> list[str]:
    """Set this process and its children up for the device; nothing of SGLang is imported yet."""
    argv = resolve_device(argv)
    if flag_value(argv, "--device") == "cpu":
        os.environ[CPU_ENGINE] = "1"
        install_if_cpu()
        ranks = flag_value(argv, "--tp-size", "--tp", "--tensor-parallel-size") or "1"
        if ranks.isdecimal() and int(ranks):  # SGLang itself says what is wrong with the flag
            threads = cpu_threads(len(os.sched_getaffinity(0)), int(ranks))
            os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    return argv


def load_plugin() -> None:
    """Load SGLang's plugins and make sure that ours was among them."""
    from sglang.srt.plugins import load_plugins

    from dspark import plugin

    load_plugins()
    if not plugin.registered():
        raise UsageError(
            "SGLang did not load this plugin, for a reason that is in the log above, or because "
            "SGLANG_PLUGINS is set without 'dspark' in it, or because it is not installed."
        )


def main(argv: list[str]) -> None:
    check_model_path(argv)
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
