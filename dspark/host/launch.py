"""`dspark serve`: SGLang's own server, with the device chosen and the plugin loaded first."""

import os
import socket

from dspark.errors import UsageError
from dspark.host import config_file, seams
from dspark.host.command_line import flag_value
from dspark.standins import CPU_ENGINE, install_if_cpu


def reads_file(argv: list[str]) -> bool:
    """Whether `--config FILE` may hold any of the other flags."""
    return any(word.partition("=")[0] == "--config" for word in argv)


def check_version() -> None:
    """Refuse another SGLang than the one whose inner functions this package knows."""
    if fault := seams.find_version_fault():
        raise UsageError(fault)


def check_model_path(argv: list[str]) -> None:
    """Refuse a directory that is not there or no model before SGLang looks for it on the hub."""
    path = flag_value(argv, "--model-path", "--model")
    if path is None:
        if reads_file(argv):
            return
        raise UsageError("--model-path DIRECTORY is needed.")
    if path.startswith(("/", "./", "../", "~")) and not os.path.exists(path):
        raise UsageError(f"--model-path {path} does not exist.")
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "config.json")):
            raise UsageError(f"--model-path {path} holds no config.json.")
        config_file.read_config(path, None)


def check_port(argv: list[str]) -> None:
    """Refuse an address that the server could not listen on, once everything has been loaded."""
    host, port = flag_value(argv, "--host") or "127.0.0.1", flag_value(argv, "--port") or "30000"
    if reads_file(argv) or not port.lstrip("-").isdecimal():
        return  # SGLang itself says what is wrong with the flag
    if not 1 <= int(port) <= 65535:
        raise UsageError(f"--port {port} must be 1 to 65535.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise UsageError(
            f"cannot listen on --host {host} --port {port}: {error.strerror}."
        ) from None


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

    from dspark.host import seams

    load_plugins()
    if not seams.registered():
        raise UsageError(
            "SGLang did not load this plugin, for a reason that is in the log above, or because "
            "SGLANG_PLUGINS is set without 'dspark' in it, or because it is not installed."
        )


def main(argv: list[str]) -> None:
    check_version()
    wants_help = bool({"-h", "--help"} & set(argv))
    if not wants_help:
        check_model_path(argv)
        check_port(argv)
    argv = prepare_process(argv)
    load_plugin()
    if wants_help:
        from dspark.host.command_line import print_help

        return print_help()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from dspark.host import rank_watch

    server_args = prepare_server_args(argv)
    try:
        run_server(server_args)
    finally:
        rank_watch.stop()
        kill_process_tree(os.getpid(), include_parent=False)
