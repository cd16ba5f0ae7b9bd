"""`dspark bench`: one table of benchmarks, each imported only when it runs."""

import importlib
import sys

COMMANDS = {
    "serve": ("dspark.bench.serve:main", "throughput, latency and acceptance of one server"),
    "pair": ("dspark.bench.pair:main", "two configurations in alternation, with an interval"),
    "exact": ("dspark.bench.exact:main", "compare greedy output token by token across servers"),
    "tune": ("dspark.bench.tune.cli:main", "look for a faster launch configuration of a kernel"),
}


def usage() -> str:
    lines = [f"  {name:<6}  {text}" for name, (_, text) in COMMANDS.items()]
    return "usage: dspark bench COMMAND [ARGS]\n\ncommands:\n" + "\n".join(lines)


def main(argv: list[str]) -> int:
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        print(f"dspark bench: unknown command {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(module), function)(rest)
