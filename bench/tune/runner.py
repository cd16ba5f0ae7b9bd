"""A tuning session of one kernel: replace its launch configuration on evidence, or keep it.

Compile every candidate for sm_89; require the incumbent's bits; time incumbent and candidate in
interleaved pairs inside CUDA graphs; judge (`statistics.py`); repeat a winner in a second process
with another seed. The incumbent against itself goes first: if that shows a difference, the session
says nothing. What a session finds holds for one kernel on one card, not for a model.

Exit status: 0 winner or no_improvement, 2 error, 3 invalid_noise.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from dspark.bench.tune import records
from dspark.bench.tune.op import CASE_SETS, TunedOp, config_id, ops_of
from dspark.bench.tune.session import Session, configurations, run

EXIT = {"winner": 0, "no_improvement": 0, "dry_run": 0, "error": 2, "invalid_noise": 3}


def parse(program: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--source", type=Path, default=Path(), help="checkout to record")
    parser.add_argument("--output", type=Path, help="empty folder for the session's files")
    parser.add_argument("--case-set", choices=CASE_SETS, default="representative")
    parser.add_argument("--warmup", type=int, default=4, help="discarded pairs a case")
    parser.add_argument("--iters", type=int, default=20, help="pairs a case")
    parser.add_argument("--timing-min-ms", type=float, default=10, help="shortest sample")
    parser.add_argument("--timing-max-ms", type=float, default=30, help="longest sample")
    parser.add_argument("--seed", type=int, default=20260811)
    parser.add_argument(
        "--candidates", type=Path, metavar="FILE", help="JSON list of configurations"
    )
    parser.add_argument("--op", metavar="NAME", help="which kernel, where the module has several")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dry-run", action="store_true", help="compile and parity only; no GPU")
    parser.add_argument("--resume", action="store_true", help="continue the session in --output")
    parser.add_argument("--list", action="store_true", help="print ops, cases and candidates")
    parser.add_argument("--confirmation", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not options.list and options.output is None:
        parser.error("--output is required")
    if options.iters < 2 or not 0 < options.timing_min_ms <= options.timing_max_ms:
        parser.error("need --iters >= 2 and 0 < --timing-min-ms <= --timing-max-ms")
    return options


def choose(ops: Sequence[TunedOp], name: str | None) -> TunedOp:
    """ValueError for an unknown name. The first op is the default."""
    for op in ops:
        if name in (None, op.name, op.entry):
            return op
    raise ValueError(f"There is no op {name!r} here; choose from {', '.join(o.name for o in ops)}.")


def print_list(ops: Sequence[TunedOp], case_set: str) -> None:
    for op in ops:
        print(f"{op.name}, incumbent {config_id(op.incumbent())}")
        print("  cases:", " ".join(case.name for case in op.cases(case_set)))
        print("  candidates:", " ".join(config_id(c) for c in configurations(op, None)))


def run_module(program: str, argv: Sequence[str]) -> int:
    """Entry of every `python -m dspark.bench.tune.OP`."""
    options = parse(program, argv)
    ops = ops_of(program)
    # Ask for devices without starting CUDA, because compiler processes are forked afterwards.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        if options.list:
            print_list(ops, options.case_set)
            return 0
        op = choose(ops, options.op)
        if not options.dry_run and not torch.cuda.is_available():
            raise ValueError("There is no CUDA device; --dry-run compiles and checks without one.")
        session = Session(program, op, options)
        status = run(session)
    except (records.OutputError, ValueError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return EXIT["error"]
    except Exception as error:
        print(f"{program}: {error!r}", file=sys.stderr)
        return EXIT["error"]
    rejected = [c for c in session.candidates if c.reject_reason]
    for candidate in rejected:
        print(f"rejected {candidate.id}: {candidate.reject_reason}")
    print(f"{op.name}: {status}, files in {options.output}")
    return EXIT[status]
