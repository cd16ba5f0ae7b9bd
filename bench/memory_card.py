"""What a server holds of a card, and that it stays that way: start, serve, idle, serve again.

    python -m dspark.bench.memory_card --model-path DIR --case NAME --record FILE [-- FLAGS]
    python -m dspark.bench.memory_card --record FILE --refused NAME --model-path DIR [-- FLAGS]
    python -m dspark.bench.memory_card --record FILE --compare NAME REFERENCE

A case starts a server, answers `--requests` requests (lengths log-uniform from 1 to
`--longest-prompt`; greedy and sampled, with stops and aborts), idles and answers one more. Where
the pool is too large to fill, SGLang's SGLANG_TEST_RETRACT and SGLANG_TEST_RETRACT_INTERVAL have
it retract requests all the same. Every case writes its part of the record when it ends, or
the reason why it failed. `--alone` sends the requests one by one: the reference that `--compare`
takes for the greedy outputs of another case. Servers whose start must fail are `--refused`.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import requests

from dspark.bench.environment import describe
from dspark.bench.serve import split_flags
from dspark.commands.local_server import PLAIN, SERVE, LocalServer, ServerFailed
from dspark.host.warm_up import compiled_kernels

SAMPLE_EVERY = 25  # requests
ABORTS, STOPS = 0.08, 0.25  # shares of the requests
STOP_EVERY = 16  # tokens of the vocabulary
MIB = 1 << 20


class Request(NamedTuple):
    number: int
    prompt: list[int]
    new_tokens: int
    sampling: dict[str, Any]
    abort_after: float | None  # seconds

    @property
    def compared(self) -> bool:
        """Whether its output is the same on every server."""
        return self.sampling["temperature"] == 0 and self.abort_after is None


def make_requests(
    count: int, longest: int, new_tokens: int, vocab: int, stops: Sequence[int], seed: int
) -> list[Request]:
    """The same for every server; request `n` does not depend on `count`."""
    return [make_request(n, longest, new_tokens, vocab, stops, seed) for n in range(count)]


def make_request(
    number: int, longest: int, new_tokens: int, vocab: int, stops: Sequence[int], seed: int
) -> Request:
    chance = random.Random(f"{seed}/{number}")
    length = round(longest ** chance.random())
    sampled = number % 2 == 1
    sampling: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    if sampled:
        sampling |= {"temperature": 0.8, "top_p": 0.95, "sampling_seed": number}
    if stops and chance.random() < STOPS:
        sampling |= {"stop_token_ids": list(stops)}
    abort = chance.uniform(0.0, 0.5) if chance.random() < ABORTS else None
    return Request(
        number,
        [chance.randrange(vocab) for _ in range(length)],
        chance.randint(1, new_tokens),
        sampling,
        abort,
    )


class Answer(NamedTuple):
    number: int
    ids: list[int] | None  # None: aborted or failed
    failure: str | None


def ask(server: LocalServer, request: Request) -> Answer:
    name = f"memory-card-{request.number}-{time.monotonic_ns()}"
    timer = None
    if request.abort_after is not None:
        timer = threading.Timer(request.abort_after, server.abort, (name,))
        timer.start()
    try:
        output = server.generate(
            request.prompt, request.new_tokens, request_id=name, **request.sampling
        )
    except (requests.RequestException, ServerFailed) as error:
        # A request that was still waiting is answered with an error status when it is aborted.
        return Answer(request.number, None, None if timer else str(error))
    finally:
        if timer is not None:
            timer.cancel()
    aborted = output.meta["finish_reason"]["type"] == "abort"
    return Answer(request.number, None if aborted else output.ids, None)


def stop_tokens(vocab: int) -> list[int]:
    """Enough of the vocabulary that any model writes one of them soon."""
    return list(range(5, vocab, STOP_EVERY))


def section(server: LocalServer) -> dict[str, Any]:
    return server.info()["internal_states"][0]["dspark"]


def pools(server: LocalServer) -> dict[str, Any]:
    """Tokens in use, once nothing runs and no prefix is kept."""
    server.flush_cache()
    load = server.load()
    return {name: value for name, value in load.items() if "used" in name or "running" in name}


def drive(
    server: LocalServer, work: Sequence[Request], clients: int
) -> tuple[list[Answer], list[dict[str, Any]]]:
    """Answers by number, and memory after every SAMPLE_EVERY requests."""
    answers: list[Answer] = []
    samples: list[dict[str, Any]] = []
    with ThreadPoolExecutor(clients) as threads:
        for first in range(0, len(work), SAMPLE_EVERY):
            part = work[first : first + SAMPLE_EVERY]
            answers += threads.map(lambda request: ask(server, request), part)
            measured = section(server)["memory"].get("measured", {})
            samples.append({"requests": first + len(part), **measured})
    return answers, samples


def growth(samples: Sequence[dict[str, Any]], after: int, field: str) -> float | None:
    """MiB between the least and the most of `field` from `after` requests on."""
    values = [
        sample[field] for sample in samples if sample["requests"] >= after and field in sample
    ]
    return (max(values) - min(values)) / MIB if values else None


def run_case(options: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    log = options.record.with_name(f"{options.case}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    program = PLAIN if options.plain else SERVE
    with LocalServer(
        options.model_path, flags, log=log, ready_s=options.ready_s, program=program
    ) as server:
        record = observe(server, options)
    text = log.read_text(errors="replace")
    return {
        "program": " ".join(program),
        "flags": list(flags),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if "RETRACT" in name},
        "startup_s": round(server.startup_s, 1),
        "said": [line for line in text.splitlines() if "Ready " in line or "marlin" in line],
        "retractions": sum(map(int, re.findall(r"#retracted_reqs: (\d+)", text))),
        "complaints": [line for line in text.splitlines() if "State check" in line][:5],
        **record,
    }


def observe(server: LocalServer, options: argparse.Namespace) -> dict[str, Any]:
    """Everything asked of a server that is ready."""
    vocab = options.vocab
    before, at_start = section(server), pools(server)
    stops = stop_tokens(vocab)
    work = make_requests(
        options.requests, options.longest_prompt, options.new_tokens, vocab, stops, options.seed
    )
    if options.alone:
        work = [request for request in work if request.compared]
    started, kernels = time.monotonic(), compiled_kernels()
    answers, samples = drive(server, work, 1 if options.alone else options.clients)
    busy = time.monotonic() - started
    at_end = pools(server)
    time.sleep(options.idle)
    after_idle = server.generate([5] * 20, 8)
    compared = {request.number for request in work if request.compared}
    return {
        "memory": before["memory"],
        "routes": before["routes"],
        "requests": len(work),
        "seconds": round(busy, 1),
        "kernels_compiled": sorted(compiled_kernels() - kernels),
        "failures": [a.failure for a in answers if a.failure][:5],
        "aborted": sum(a.ids is None for a in answers),
        "stopped": sum(
            a.ids is not None and len(a.ids) < r.new_tokens
            for a, r in zip(answers, work, strict=True)
        ),
        "pools_at_start": at_start,
        "pools_at_end": at_end,
        "samples": samples,
        "reserved_growth_mib": growth(samples, options.flat_after, "reserved"),
        "card_growth_mib": growth(samples, options.flat_after, "card_free"),
        "idle_s": options.idle,
        "alive_after_idle": len(after_idle.ids) == 8,
        "memory_at_end": section(server)["memory"].get("measured"),
        "ids": {a.number: a.ids for a in answers if a.number in compared},
    }


def planned_against_measured(memory: dict[str, Any]) -> float | None:
    """Share by which the plan, its reserve left out, exceeds what torch has reserved at most."""
    if "measured" not in memory:
        return None
    planned = memory["planned"]["total"] - memory["planned"]["reserve"]
    return planned / memory["measured"]["most_reserved"] - 1


def run_refused(options: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    """A start that must end with one sentence."""
    command = [sys.executable, "-m", "dspark.cli", "serve", "--model-path", options.model_path]
    done = subprocess.run(
        [*command, *flags], capture_output=True, text=True, timeout=options.ready_s
    )
    lines = done.stderr.strip().splitlines() or [""]
    return {"flags": list(flags), "status": done.returncode, "said": lines[-1]}


def compare(record: dict[str, Any], name: str, reference: str) -> dict[str, Any]:
    """Greedy outputs of two cases, by request number."""
    ours, theirs = (record["cases"][case]["ids"] for case in (name, reference))
    both = sorted(set(ours) & set(theirs), key=int)
    differing = [number for number in both if ours[number] != theirs[number]]
    return {"compared": len(both), "equal": len(both) - len(differing), "differing": differing[:20]}


def read_record(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(file.read_text())
    return {"cases": {}, "refused": {}, "comparisons": {}}


def write_part(file: Path, part: str, name: str, content: dict[str, Any]) -> None:
    record = read_record(file)
    record["environment"] = describe()
    record[part][name] = content
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    own, flags = split_flags(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--case", metavar="NAME", help="start a server and drive it")
    what.add_argument("--refused", metavar="NAME", help="start a server that must refuse")
    what.add_argument("--compare", nargs=2, metavar=("NAME", "REFERENCE"))
    parser.add_argument("--record", type=Path, required=True, metavar="FILE")
    parser.add_argument("--model-path", metavar="DIR")
    parser.add_argument("--plain", action="store_true", help="start python -m sglang.launch_server")
    parser.add_argument("--alone", action="store_true", help="greedy requests only, one by one")
    parser.add_argument("--requests", type=int, default=500, metavar="N")
    parser.add_argument("--clients", type=int, default=16, metavar="C")
    parser.add_argument("--longest-prompt", type=int, default=6000, metavar="N")
    parser.add_argument("--new-tokens", type=int, default=48, metavar="N", help="at most")
    parser.add_argument("--flat-after", type=int, default=100, metavar="N", help="requests")
    parser.add_argument("--idle", type=float, default=60, metavar="S")
    parser.add_argument("--ready-s", type=float, default=400, metavar="S")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(own)
    if options.model_path is not None:
        config = json.loads((Path(options.model_path) / "config.json").read_text())
        options.vocab = config["vocab_size"]
    elif options.compare is None:
        parser.error("--model-path is needed")
    return options, flags


def main(argv: Sequence[str]) -> int:
    options, flags = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    if options.compare:
        name, reference = options.compare
        found = compare(read_record(options.record), name, reference)
        write_part(options.record, "comparisons", f"{name} against {reference}", found)
        print(found)
        return int(found["compared"] == 0 or found["equal"] < found["compared"])
    if options.refused:
        found = run_refused(options, flags)
        write_part(options.record, "refused", options.refused, found)
        print(found)
        return int(found["status"] != 1)
    try:
        found = run_case(options, flags)
    except BaseException as error:  # also when somebody ends this process: the server ends with it
        write_part(options.record, "cases", options.case, {"failed": f"{error!r}"[-3000:]})
        raise
    found["plan_over_measured"] = planned_against_measured(
        found["memory"] | {"measured": found["memory_at_end"]} if found["memory_at_end"] else {}
    )
    write_part(options.record, "cases", options.case, found)
    short = {k: v for k, v in found.items() if k not in ("ids", "samples", "memory", "routes")}
    print(options.case, json.dumps(short))
    return int(bool(found["failures"]) or found["pools_at_start"] != found["pools_at_end"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
