"""`dspark bench pair`: two configurations in alternation, and the ratio with its 95 % interval.

    dspark bench pair --model-path DIR                      target-only against DSpark
    dspark bench pair --model-path DIR --a "FLAGS" --b "FLAGS"
    dspark bench pair --a-url URL --b-url URL               servers that run already

A round measures both arms back to back, as often A first as B first, so that drift of the machine
cancels. There is no speed-up without both arms, and none when their outputs differ.
"""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from dspark.bench import environment
from dspark.bench.client import APIS, RequestFailed
from dspark.bench.difference import Difference, first_differences
from dspark.bench.interval import Ratio, paired_ratio
from dspark.bench.load import Target
from dspark.bench.measure import (
    BenchError,
    Level,
    add_concurrency_argument,
    add_prompt_arguments,
    measure,
    model_path_of,
    own_server,
    prompts_of,
    warm_up,
    write_record,
)
from dspark.bench.prompts import PromptError
from dspark.bench.serve import print_inputs, print_levels
from dspark.bench.throughput import THROUGHPUTS, Figures
from dspark.bench.tune.schedule import balanced_orders
from dspark.commands.local_server import ServerFailed

ARMS = ("A", "B")
DSPARK_FLAGS = "--speculative-algorithm dspark"


class Arm(NamedTuple):
    label: str
    flags: list[str]
    target: Target | None  # a server that runs already


class Round(NamedTuple):
    order: str  # "AB" or "BA"
    levels: Mapping[str, list[Level]]  # arm -> one level a concurrency


Serving = Callable[[str], AbstractContextManager[Target]]  # arm -> its server


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dspark bench pair",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model-path", help="checkpoint that arms without a URL serve")
    for arm, flags in (("a", ""), ("b", DSPARK_FLAGS)):
        parser.add_argument(f"--{arm}", default=flags, metavar="FLAGS", help=f"default: {flags!r}")
        parser.add_argument(f"--{arm}-label")
        parser.add_argument(f"--{arm}-url", metavar="URL")
        parser.add_argument(f"--{arm}-api", choices=APIS, default="sglang")
        parser.add_argument(f"--{arm}-model", default="default")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of runs, at least 2")
    parser.add_argument(
        "--restart",
        action="store_true",
        help="start each server anew for each of its turns: for machines that hold only one",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0,
        metavar="T",
        help="above 0 every request draws by a seed of its own, the same in both arms",
    )
    add_concurrency_argument(parser, [1, 4])
    add_prompt_arguments(parser)
    options = parser.parse_args(argv)
    if options.rounds < 2:
        parser.error("an interval needs at least 2 rounds")
    if not options.model_path and not (options.a_url and options.b_url):
        parser.error("give --model-path, or both --a-url and --b-url: a ratio needs both arms")
    return options


def arms_of(options: argparse.Namespace) -> dict[str, Arm]:
    def one(name: str) -> Arm:
        def get(part: str) -> Any:
            return getattr(options, name + part)

        flags = shlex.split(get(""))
        target = None
        if get("_url"):
            url = get("_url").rstrip("/")
            target = Target(url, get("_api"), get("_model"), options.temperature)
        default = target.url if target else default_label(flags)
        return Arm(get("_label") or default, flags, target)

    return {name: one(name.lower()) for name in ARMS}


def default_label(flags: Sequence[str]) -> str:
    if not flags:
        return "target-only"
    return "DSpark" if list(flags) == shlex.split(DSPARK_FLAGS) else shlex.join(flags)


@contextlib.contextmanager
def standing(targets: Mapping[str, Target], arm: str) -> Iterator[Target]:
    yield targets[arm]


@contextlib.contextmanager
def fresh(
    arms: Mapping[str, Arm], model_path: str, prompts: list, temperature: float, arm: str
) -> Iterator[Target]:
    target = arms[arm].target
    if target is not None:
        yield target
        return
    with own_server(model_path, arms[arm].flags) as started:
        warm_up(started, prompts, 16)
        yield started._replace(temperature=temperature)


def run_rounds(
    orders: Sequence[str],
    serving: Serving,
    prompts: Sequence[list[int]],
    concurrency: Sequence[int],
    new_tokens: int,
) -> list[Round]:
    rounds = []
    for number, order in enumerate(orders, 1):
        levels: dict[str, list[Level]] = {}
        for arm in order:
            with serving(arm) as target:
                levels[arm] = [measure(target, prompts[:c], new_tokens) for c in concurrency]
        rounds.append(Round(order, levels))
        speeds = ", ".join(
            f"{arm} " + "/".join(f"{level.figures.end_to_end:.1f}" for level in levels[arm])
            for arm in ARMS
        )
        print(f"round {number}/{len(orders)} {order}: {speeds} tokens/s end to end", flush=True)
    return rounds


def compare_outputs(rounds: Sequence[Round]) -> tuple[bool | None, list[Difference]]:
    """(whether all outputs agree, first differences); None where a server sends no ids."""
    outputs: dict[str, list[list[int]]] = {}
    for number, one in enumerate(rounds, 1):
        for arm, levels in one.levels.items():
            for level in levels:
                if any(ids is None for ids in level.ids):
                    return None, []
                name = f"{arm} round {number} C{level.figures.concurrency}"
                outputs[name] = [ids or [] for ids in level.ids]
    # A level of C clients answers the first C prompts.
    widest = max(outputs, key=lambda name: len(outputs[name]))
    found = [
        difference
        for name, ids in outputs.items()
        for difference in first_differences({widest: outputs[widest][: len(ids)], name: ids})
    ]
    return not found, found


def ratios(rounds: Sequence[Round], level: int) -> dict[str, Ratio]:
    """B/A of every throughput that both arms reported in at least two rounds."""
    result = {}
    for name in THROUGHPUTS:
        pairs = [[getattr(one.levels[arm][level].figures, name) for arm in ARMS] for one in rounds]
        known = [pair for pair in pairs if all(pair)]
        if len(known) >= 2:
            result[name] = paired_ratio([a for a, _ in known], [b for _, b in known])
    return result


def plain_ratios(speed_up: Mapping[int, Mapping[str, Ratio]]) -> dict[str, dict[str, dict]]:
    """Number of clients -> statistic -> fields of its ratio."""
    return {
        str(clients): {name: ratio._asdict() for name, ratio in by_statistic.items()}
        for clients, by_statistic in speed_up.items()
    }


def print_verdict(
    arms: Mapping[str, Arm],
    speed_up: Mapping[int, Mapping[str, Ratio]] | None,
    identical: bool | None,
    differences: Sequence[Difference],
) -> None:
    if speed_up is None:
        print(f"NO SPEED-UP: the outputs differ, so the arms did not do the same work. "
              f"First: {differences[0]}.")  # fmt: skip
        return
    note = "identical outputs" if identical else "outputs not compared: a server sends no ids"
    print(f"{arms['B'].label} over {arms['A'].label}, {note}:")
    for clients, by_statistic in speed_up.items():
        for name, ratio in by_statistic.items():
            established = "" if ratio.differs_from_one() else "  (no difference established)"
            print(
                f"  C{clients} {name.replace('_', ' ')}: {ratio.geomean:.3f}x, 95 % interval "
                f"{ratio.low:.3f} to {ratio.high:.3f}, {ratio.pairs} pairs{established}"
            )


def figures_of(rounds: Sequence[Round], arm: str, level: int) -> list[Figures]:
    return [one.levels[arm][level].figures for one in rounds]


def run(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    arms = arms_of(options)
    model_path = options.model_path or next(
        (path for arm in arms.values() if arm.target and (path := model_path_of(arm.target))), None
    )
    prompts = prompts_of(options, max(options.concurrency), model_path)
    print_inputs(prompts, options.output_tokens)
    orders = balanced_orders(options.seed, "pair", prompts.sha256, "B", options.rounds)
    with contextlib.ExitStack() as stack:
        if options.restart:

            def serving(arm: str) -> AbstractContextManager[Target]:
                return fresh(arms, options.model_path, prompts.ids, options.temperature, arm)
        else:
            targets = {
                name: stack.enter_context(
                    fresh(arms, options.model_path, prompts.ids, options.temperature, name)
                )
                for name in ARMS
            }

            def serving(arm: str) -> AbstractContextManager[Target]:
                return standing(targets, arm)

        rounds = run_rounds(
            orders, serving, prompts.ids, options.concurrency, options.output_tokens
        )
    for name in ARMS:
        print(f"\n{name}: {arms[name].label}, last round")
        print_levels([level.figures for level in rounds[-1].levels[name]])
    print()
    identical, differences = compare_outputs(rounds)
    speed_up = None
    if identical is not False:
        speed_up = {c: ratios(rounds, i) for i, c in enumerate(options.concurrency)}
    print_verdict(arms, speed_up, identical, differences)
    record = {
        "schema": 1,
        "kind": "pair",
        "environment": environment.describe(),
        "model": Path(model_path).name if model_path else None,
        "prompts": prompts.describe(),
        "output_tokens": options.output_tokens,
        "temperature": options.temperature,
        "restart": options.restart,
        "arms": {name: {"label": arm.label, "flags": arm.flags} for name, arm in arms.items()},
        "outputs_identical": identical,
        "differences": [difference._asdict() for difference in differences],
        "speed_up": None if speed_up is None else plain_ratios(speed_up),
        "rounds": [
            {
                "order": one.order,
                "levels": {
                    arm: [level.figures._asdict() for level in levels]
                    for arm, levels in one.levels.items()
                },
            }
            for one in rounds
        ],
    }
    return record, identical is not False


def main(argv: list[str]) -> int:
    """0: a ratio was printed; 1: the outputs differ; 2: an arm could not be measured."""
    options = parse(argv)
    try:
        record, comparable = run(options)
    except (BenchError, PromptError, RequestFailed, ServerFailed, aiohttp.ClientError) as error:
        print(f"dspark bench pair: no speed-up without both arms: {error}", file=sys.stderr)
        return 2
    write_record(options.json, record)
    return 0 if comparable else 1
