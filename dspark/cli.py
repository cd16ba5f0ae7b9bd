"""The `dspark` command: one table of subcommands, each imported only when it runs.

SGLang spawns its workers, and a spawned process first re-imports the main module of its parent.
That main module is this one, so the stand-ins below are in place in every child before anything
of SGLang is imported there.
"""

import importlib
import importlib.metadata
import sys

from dspark.standins import install_if_cpu

install_if_cpu()

COMMANDS = {
    "serve": ("dspark.host.launch:main", "start the SGLang server; takes every launch_server flag"),
    "plan": (
        "dspark.commands.plan:main",
        "say what given cards would hold, how fast a step would be, and the flags for it",
    ),
    "doctor": (
        "dspark.commands.doctor:main",
        "check this machine and a checkpoint before serving",
    ),
    "top": ("dspark.commands.top:main", "watch a running server: requests, pool, accepted drafts"),
    "make-checkpoint": (
        "dspark.target.checkpoint.make:main",
        "write a small checkpoint in the official format",
    ),
    "fit-confidence": (
        "dspark.commands.fit_confidence:main",
        "calibrate the draft's confidence on what a server has verified",
    ),
    "profile-steps": (
        "dspark.commands.profile_steps:main",
        "measure what a step costs by the rows it verifies",
    ),
    "demo": (
        "dspark.commands.demo:main",
        "serve a small model on this machine and stream a few completions",
    ),
    "python": (
        "dspark.commands.python:main",
        "run a module, file or -c CODE of SGLang's, such as -m sglang.bench_serving",
    ),
    "report": (
        "dspark.bench.page.cli:main",
        "write one HTML page from a benchmark's record",
    ),
    "bench": ("dspark.bench.cli:main", "measure servers and kernels, compare outputs"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "usage: dspark COMMAND [ARGS]\n       dspark --version\n\ncommands:\n" + "\n".join(lines)


def version() -> str:
    """This package's version and that of the SGLang it finds."""
    return f"sglang-dspark {_installed('sglang-dspark')}, SGLang {_installed('sglang')}"


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; its `main(argv)` returns an exit status or None."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(version())
        return 0
    if name not in COMMANDS:
        print(f"dspark: unknown command {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(module), function)(rest) or 0


if __name__ == "__main__":
    sys.exit(main())
