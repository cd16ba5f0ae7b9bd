"""What an operator can set beyond SGLang's own flags: one table for everything that names it.

Flags, `dspark serve --help` and the table in docs/flags.md are made from `OPTIONS`. A flag is
handed on as its environment variable, which worker processes inherit and which the code reads.
"""

import argparse
import os
import sys
from typing import NamedTuple


class Option(NamedTuple):
    variable: str
    flag: str | None  # None: for debugging and tests, by environment only
    values: str  # as argparse shows them
    default: str  # what happens without it
    meaning: str
    needs_draft: bool = False  # means nothing without --speculative-algorithm DSPARK


OPTIONS = (
    Option(
        "DSPARK_VERIFY",
        "--dspark-verify",
        "{static,scheduled,cap-accept}",
        "static",
        "which drafts the target checks: all; those that confidences and step cost call worth "
        "their time; all, but only those may be accepted",
        needs_draft=True,
    ),
    Option(
        "DSPARK_STEP_COST",
        "--dspark-step-cost",
        "FILE",
        "measured at start",
        "what a step costs by its requests and rows, as dspark profile-steps measures it; without "
        "it a server that needs it measures for up to 20 s before it answers anybody, once for a "
        "machine, checkpoint and flags",
        needs_draft=True,
    ),
    Option(
        "DSPARK_CALIBRATION",
        "--dspark-calibration",
        "FILE",
        "none",
        "temperatures of the confidence head, as dspark fit-confidence fits them",
        needs_draft=True,
    ),
    Option(
        "DSPARK_VERIFY_BUDGET",
        "--dspark-verify-budget",
        "ROWS",
        "computed",
        "a fixed number of draft rows for every step in place of the computed one",
        needs_draft=True,
    ),
    Option(
        "DSPARK_SAMPLES",
        "--dspark-samples",
        "FILE",
        "none",
        "file that receives confidences and outcomes, for dspark fit-confidence; needs static "
        "verification",
        needs_draft=True,
    ),
    Option(
        "DSPARK_TUNED",
        "--dspark-tuned",
        "FILE:FILE...",
        "none",
        "launch configurations for GPUs: winner.json files of the kernel tuner",
    ),
    Option(
        "DSPARK_CARD_BYTES",
        None,
        "BYTES",
        "what is free at start",
        "what the server divides among weights, pools and workspace of each card; on a CPU it "
        "switches that division on",
    ),
    Option(
        "DSPARK_ALLOW_ANY_GPU",
        None,
        "1",
        "refuse",
        "start on a GPU whose compute capability is refused, such as 8.6",
    ),
    Option(
        "DSPARK_KERNELS",
        None,
        "reference",
        "Triton on GPUs",
        "run the torch reference of every operation instead, to suspect or clear a kernel",
    ),
    Option(
        "DSPARK_KEEP_REJECTED",
        None,
        "1",
        "clear",
        "leave the state rows of rejected drafts as they are: no output may change",
    ),
    Option(
        "DSPARK_FORCED_DRAFTS",
        None,
        "1",
        "off",
        "let a request name its drafts (dspark/speculation/forced_drafts.py), for tests",
    ),
    Option(
        "STATE_DEBUG",
        None,
        "1",
        "off",
        "check who owns every state row before every forward; slow",
    ),
    Option(
        "DSPARK_COMMIT",
        None,
        "COMMIT",
        "git",
        "what a benchmark record names where there is no git folder",
    ),
)
TITLE = "DSpark"
NOTE = (
    "Drafting is switched on by --speculative-algorithm DSPARK. These flags are what SGLang has "
    "none for. Each is also an environment variable: --dspark-verify is DSPARK_VERIFY. Where both "
    "are given the flag counts. Of SGLang's flags below, what DeepSeek-V4 is not served with is "
    "refused in a sentence before anything loads."
)

_flags_given: dict[str, str] = {}  # variable: flag, of those that this process has parsed


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every option that has a flag, as the first group of the parser's help."""
    group = parser.add_argument_group(TITLE, NOTE)
    for option in OPTIONS:
        if option.flag:
            group.add_argument(
                option.flag,
                action=SetVariable,
                dest=option.variable,
                metavar=option.values,
                help=f"{option.meaning} (default: {option.default})",
            )
    parser._action_groups.insert(0, parser._action_groups.pop())


class SetVariable(argparse.Action):
    """Sets the environment variable that the flag stands for; `dest` is its name."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        variable, flag, value = self.dest, self.option_strings[0], str(values)
        before = os.environ.get(variable)
        if before and before != value:
            print(f"dspark: {flag} {value} counts, not {variable}={before}.", file=sys.stderr)
        os.environ[variable] = value
        _flags_given[variable] = flag
        setattr(namespace, variable, value)


def name(variable: str) -> str:
    """What the operator used to set it: the flag or the variable."""
    return _flags_given.get(variable, variable)


def setting(variable: str) -> str:
    """What the operator wrote: `--dspark-verify static` or `DSPARK_VERIFY=static`."""
    separator = " " if variable in _flags_given else "="
    return f"{name(variable)}{separator}{os.environ.get(variable, '')}"


def draft_flags_given() -> list[str]:
    """Flags on the command line that mean nothing without a draft."""
    return [
        _flags_given[o.variable] for o in OPTIONS if o.needs_draft and o.variable in _flags_given
    ]


def markdown() -> str:
    """The table of docs/flags.md."""
    rows = [
        f"| {f'`{o.flag}`' if o.flag else '-'} | `{o.variable}` | `{o.values}` | {o.default} "
        f"| {o.meaning} |"
        for o in OPTIONS
    ]
    return "\n".join(
        ["| flag | variable | values | default | meaning |", "|---|---|---|---|---|", *rows]
    )
