"""`dspark profile-steps`: measure what a step costs by the rows it verifies.

Starts a server, runs batches of several sizes under several verify budgets, and writes the table
that `--dspark-step-cost` takes. Drafts are forced to be random, so that every step of every request
emits one token and steps can be counted from outside.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence

from dspark.commands.local_server import LocalServer, ServerFailed
from dspark.speculation import forced_drafts, step_cost

SHARES = (0.001, 0.2, 0.4, 0.6, 0.8, 1.0)  # of all drafts; SGLang takes no budget of exactly 0
ENVIRONMENT = {forced_drafts.VARIABLE: "1", "DSPARK_VERIFY": "scheduled"}
PROMPT_TOKENS = 64


def rows_verified(requests: int, share: float, depth: int) -> int:
    """Target rows of one step, as the server's scheduler rounds them."""
    return requests + round(share * requests * depth)


def measure(
    run: Callable[[int, int], None],
    set_share: Callable[[float], None],
    batch_sizes: Sequence[int],
    depth: int,
    steps: int,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, list[float]]:
    """Step times in seconds by rows.

    A short and a long run are subtracted, so that prompts and HTTP do not count.

    Args:
        run: (requests, steps) completes that many requests of that many steps in one batch.
    """
    seconds: dict[int, list[float]] = {}
    for requests in batch_sizes:
        for share in SHARES:
            set_share(share)
            for _ in range(repeats):
                start = clock()
                run(requests, steps)
                middle = clock()
                run(requests, 2 * steps)
                elapsed = (clock() - middle) - (middle - start)
                if elapsed > 0:  # noise can exceed a very short run
                    rows = rows_verified(requests, share, depth)
                    seconds.setdefault(rows, []).append(elapsed / steps)
    return seconds


def profile(server: LocalServer, batch_sizes: Sequence[int], steps: int, repeats: int):
    """Measure a running server that was started with `ENVIRONMENT`."""
    draw = random.Random(0)

    def run(requests: int, tokens: int) -> None:
        prompts = [[draw.randrange(2, 500) for _ in range(PROMPT_TOKENS)] for _ in range(requests)]
        server.generate_batch(prompts, tokens, custom_params={"draft": "random"})

    def set_share(share: float) -> None:
        body = {"server_args": {"dspark_force_budget_frac": share}}
        server.request("/set_internal_state", body)

    depth = server.info()["internal_states"][0]["dspark"]["depth"]
    run(max(batch_sizes), 4)  # warm-up
    return step_cost.from_samples(measure(run, set_share, batch_sizes, depth, steps, repeats))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dspark profile-steps", description=__doc__)
    parser.add_argument("model", help="checkpoint directory")
    parser.add_argument("table", help="JSON file to write")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=32, help="steps of the shorter run")
    parser.add_argument("--repeats", type=int, default=5, help="the median of these counts")
    arguments, flags = parser.parse_known_args(argv)
    flags = ["--speculative-algorithm", "dspark", *flags]
    try:
        with LocalServer(arguments.model, flags, ENVIRONMENT) as server:
            cost = profile(server, arguments.batch_sizes, arguments.steps, arguments.repeats)
        step_cost.save(cost, arguments.table)
    except (ServerFailed, step_cost.TableError, OSError) as error:
        print(f"dspark profile-steps: {error}", file=sys.stderr)
        return 1
    for rows, rate in zip(cost.rows, cost.steps_per_second, strict=True):
        print(f"{rows:4d} rows  {1000 / rate:8.2f} ms a step")
    return 0
