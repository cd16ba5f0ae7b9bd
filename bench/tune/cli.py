"""`dspark bench tune OP`: the same as `python -m dspark.bench.tune.OP`."""

import sys

OPS = ("dspark_schedule", "sparse_decode", "sparse_prefill", "moe", "fp8_linear")


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in OPS:
        print(f"usage: dspark bench tune OP [ARGS]\n\nops: {', '.join(OPS)}", file=sys.stderr)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    from dspark.bench.tune.runner import run_module

    return run_module(f"dspark.bench.tune.{argv[0]}", argv[1:])
