"""`dspark profile-steps`: measure what a step costs by the requests and rows of its batch.

Starts a server, runs batches of several sizes under several verify budgets, and writes the table
that `--dspark-step-cost` takes. Drafts are forced to be random, so that every step of every request
emits one token and steps can be counted from outside.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

import psutil

from dspark.commands.local_server import LocalServer, ServerFailed
from dspark.speculation import forced_drafts, step_cost
from dspark.speculation.step_cost import Sample, StepCost

SHARES = (0.001, 0.2, 0.4, 0.6, 0.8, 1.0)  # of all drafts; SGLang takes no budget of exactly 0
ENVIRONMENT = {forced_drafts.VARIABLE: "1", "DSPARK_VERIFY": "scheduled"}
PROMPT_TOKENS = 64

Run = Callable[[int, int, bool], float]


def measure(
    run: Run,
    set_share: Callable[[float], None],
    batch_sizes: Sequence[int],
    steps: int,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Sample]:
    """Measured steps.

    A short and a long run are subtracted, so that prompts and HTTP do not count. All sizes and
    budgets are measured in turn before any is repeated, so that a machine that gets slower for a
    while does so for all of them.

    Args:
        run: (requests, steps, whether they draft) completes that many requests of that many steps
            in one batch, and returns the rows of a step of the whole batch, on average.
    """
    seconds: dict[tuple[int, float | None], list[float]] = {}
    rows: dict[tuple[int, float | None], list[float]] = {}
    for _ in range(repeats):
        for requests in batch_sizes:
            for share in (*SHARES, None):  # None: without a draft
                if share is not None:
                    set_share(share)
                drafts = share is not None
                start = clock()
                run(requests, steps, drafts)
                middle = clock()
                found = run(requests, 2 * steps, drafts)
                elapsed = (clock() - middle) - (middle - start)
                rows.setdefault((requests, share), []).append(found)
                if elapsed > 0:  # noise can exceed a very short run
                    seconds.setdefault((requests, share), []).append(elapsed / steps)
    # A budget may admit fewer rows than it could: drafts without a chance are never verified.
    return [
        Sample(requests, round(fmean(rows[requests, share])), time, share is not None)
        for (requests, share), times in seconds.items()
        for time in times
    ]


def processor_seconds(server: LocalServer) -> float:
    """Time on processors that the server's processes have had."""
    main = psutil.Process(server.process.pid)
    used = [process.cpu_times() for process in (main, *main.children(recursive=True))]
    return sum(times.user + times.system for times in used)


def profile(
    server: LocalServer,
    batch_sizes: Sequence[int],
    steps: int,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCost:
    """Measure a running server that was started with `ENVIRONMENT`."""
    draw = random.Random(0)

    def run(requests: int, tokens: int, drafts: bool) -> float:
        prompts = [[draw.randrange(2, 500) for _ in range(PROMPT_TOKENS)] for _ in range(requests)]
        wish = {"draft": "random" if drafts else forced_drafts.NONE}
        outputs = server.generate_batch(prompts, tokens, custom_params=wish)
        return sum(output.meta["spec_cap_length"] for output in outputs)

    def set_share(share: float) -> None:
        body = {"server_args": {"dspark_force_budget_frac": share}}
        server.request("/set_internal_state", body)

    run(max(batch_sizes), 4, True)  # warm-up
    return step_cost.from_samples(measure(run, set_share, batch_sizes, steps, repeats, clock))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dspark profile-steps", description=__doc__)
    parser.add_argument("model", help="checkpoint directory")
    parser.add_argument("table", help="JSON file to write")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=32, help="steps of the shorter run")
    parser.add_argument("--repeats", type=int, default=5, help="the median of these counts")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count the server's time on processors: for a CPU that others use as well, with "
        "OMP_NUM_THREADS=1",
    )
    arguments, flags = parser.parse_known_args(argv)
    flags = ["--speculative-algorithm", "dspark", *flags]
    try:
        with LocalServer(arguments.model, flags, ENVIRONMENT) as server:
            clock = partial(processor_seconds, server)
            cost = profile(
                server,
                arguments.batch_sizes,
                arguments.steps,
                arguments.repeats,
                clock if arguments.processor_time else time.perf_counter,
            )
        step_cost.save(cost, arguments.table)
    except (ServerFailed, step_cost.TableError, OSError) as error:
        print(f"dspark profile-steps: {error}", file=sys.stderr)
        return 1
    for steps in cost:
        for rows, seconds in zip(steps.rows, steps.seconds, strict=True):
            print(f"{steps.requests:4d} requests {rows:4d} rows  {1000 * seconds:8.2f} ms a step")
        if steps.without_draft is not None:
            shown = f"{1000 * steps.without_draft:8.2f} ms a step without a draft"
            print(f"{steps.requests:4d} requests {steps.requests:4d} rows  {shown}")
    return 0
