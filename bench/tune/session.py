"""One tuning session: its state, its measurements, and what its files say."""

import argparse
import json
import math
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from dspark.bench import environment
from dspark.bench.tune import records, statistics, timing
from dspark.bench.tune.op import TunedOp, config_id, config_json
from dspark.bench.tune.parity import (
    Outputs,
    Parity,
    check_outputs,
    compare,
    parity_interpreted,
    same_bits,
)
from dspark.bench.tune.resources import Fit, fits
from dspark.bench.tune.schedule import balanced_orders, generator
from dspark.kernels.common import launch_table
from dspark.kernels.common.launch_table import LaunchConfig

CONTROL = "control"  # candidate 0: the incumbent against itself
CLOCK_DROP = 0.03


class Candidate(NamedTuple):
    id: str
    config: LaunchConfig
    fit: Fit
    parity: Parity | None  # None: not asked, because it does not fit
    reject_reason: str | None


def configurations(op: TunedOp, file: Path | None) -> list[LaunchConfig]:
    """Candidates from a file or the op's grid; the incumbent is not its own competitor."""
    if file is None:
        configs = list(op.candidates)
    else:
        configs = [LaunchConfig(**config) for config in json.loads(file.read_text())]
    constants = op.incumbent().constexprs.keys()
    for config in configs:
        if config.constexprs.keys() != constants:
            raise ValueError(f"{config_id(config)} does not set exactly {', '.join(constants)}.")
    return [config for config in configs if config != op.incumbent()]


def describe_source(checkout: Path, op: TunedOp) -> dict[str, Any]:
    """Commit, and hashes of the kernel and of what measures it."""
    checkout = checkout.resolve()
    files = [
        *sorted((checkout / "kernels" / op.family).glob("*.py")),
        *sorted((checkout / "bench" / "tune").glob("*.py")),
    ]
    hashes = {str(f.relative_to(checkout)): records.sha256(f) for f in files}
    return {**environment.source(checkout), "files": hashes}


def describe_environment(device: torch.device | None) -> dict[str, Any]:
    packages = {name: environment.package_version(name) for name in ("torch", "triton")}
    if device is None:
        return {"gpu": None, "sm": None, **packages, "python": platform.python_version()}
    card = torch.cuda.get_device_properties(device)
    drivers = {gpu["driver_version"] for gpu in environment.gpus()}
    return {
        "gpu": card.name,
        "sm": card.major * 10 + card.minor,
        "driver": ", ".join(sorted(drivers)) or None,
        **packages,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "clocks_before": None,
        "clocks_after": None,
    }


class Session:
    """State of one run; `record` is what session.json will hold."""

    def __init__(self, program: str, op: TunedOp, options: argparse.Namespace):
        self.program = program
        self.op = op
        self.options = options
        self.gates = statistics.Gates()
        self.cases = {case.name: case for case in op.cases(options.case_set)}
        self.device: torch.device | None = None
        self.candidates: list[Candidate] = []
        self.results: dict[str, statistics.Comparison] = {}
        self.samples: records.Samples = {}
        self.incumbent_fit: Fit | None = None
        self.pairs_file: Path = options.output / "pairs.jsonl"
        self.env: dict[str, Any] = {}
        self.clock_drops: dict[str, str] = {}

    def record(self, status: str, winner: str | None, note: str | None = None) -> dict[str, Any]:
        return {
            "schema": records.SCHEMA,
            "op": self.op.name,
            "status": status,
            "note": note,
            "seed": self.options.seed,
            "source": describe_source(self.options.source, self.op),
            "env": self.env,
            "args": {
                name: getattr(self.options, name)
                for name in ("case_set", "warmup", "iters", "timing_min_ms", "timing_max_ms")
            },
            "gates": self.gates._asdict(),
            "incumbent": {
                "id": config_id(self.op.incumbent()),
                "config": config_json(self.op.incumbent()),
                "aot": self.incumbent_fit and _aot_json(self.incumbent_fit),
            },
            "candidates": [self._control(), *map(self._candidate, self.candidates)],
            "winner": winner,
        }

    def _control(self) -> dict[str, Any]:
        return {
            "id": CONTROL,
            "config": config_json(self.op.incumbent()),
            "aot": self.incumbent_fit and _aot_json(self.incumbent_fit),
            "parity": "exact",
            "reject_reason": None,
            **self._result(CONTROL),
        }

    def _candidate(self, candidate: Candidate) -> dict[str, Any]:
        return {
            "id": candidate.id,
            "config": config_json(candidate.config),
            "aot": _aot_json(candidate.fit),
            "parity": candidate.parity and candidate.parity.parity,
            "reject_reason": candidate.reject_reason or self.clock_drops.get(candidate.id),
            **self._result(candidate.id),
        }

    def _result(self, name: str) -> dict[str, Any]:
        result = self.results.get(name)
        if result is None:
            return {"geomean": None, "pass": False, "per_case": []}
        return {
            "geomean": result.geomean,
            "ci95_low": result.ci_low,
            "ci95_high": result.ci_high,
            "ci_method": result.ci_method,
            "worst": result.worst._asdict(),
            "pass": result.passes(self.gates) and name not in self.clock_drops,
            "per_case": [
                _case_json(case, samples, result.per_case[case])
                for case, samples in self.samples[name].items()
            ],
        }

    def filter(self) -> None:
        """Compile the incumbent and every candidate for sm_89."""
        incumbent = self.op.incumbent()
        configs = configurations(self.op, self.options.candidates)
        print(f"{self.op.name}: compiling {len(configs) + 1} configurations for sm_89", flush=True)
        fit = fits(self.op, [incumbent, *configs])
        self.incumbent_fit = fit[config_id(incumbent)]
        self.candidates = [
            Candidate(config_id(c), c, fit[config_id(c)], None, fit[config_id(c)].problem)
            for c in configs
        ]

    def alive(self) -> list[Candidate]:
        return [c for c in self.candidates if c.reject_reason is None]

    def reject(self, name: str, parity: Parity) -> None:
        self.candidates = [
            c._replace(parity=parity, reject_reason=c.reject_reason or parity.reason)
            if c.id == name
            else c
            for c in self.candidates
        ]

    def check_small_cases(self) -> None:
        """Parity on the small cases, on the GPU or under the interpreter.

        Raises:
            RuntimeError: the incumbent itself misses the reference.
        """
        configs = [candidate.config for candidate in self.alive()]
        if self.device is None:
            found = parity_interpreted(self.program, self.op, [self.op.incumbent(), *configs])
        else:
            expected = check_outputs(self.op, self.op.incumbent(), self.device)
            found = {
                config_id(c): self.check_on_device(c, expected)
                for c in (self.op.incumbent(), *configs)
            }
        own = found.pop(config_id(self.op.incumbent()))
        if own.parity != "exact":
            raise RuntimeError(f"the incumbent fails its own check: {own.reason}")
        for name, parity in found.items():
            self.reject(name, parity)

    def check_on_device(self, config: LaunchConfig, expected: Outputs) -> Parity:
        assert self.device is not None
        try:
            return compare(self.op, expected, check_outputs(self.op, config, self.device))
        except Exception as error:  # more of the card's resources than it has, for instance
            return Parity("failed", f"does not run: {error!r}")

    def time(self, name: str, config: LaunchConfig) -> Parity:
        """Parity and times of one configuration on every case; samples go to the file at once."""
        assert self.device is not None
        options = self.options
        order = list(self.cases)
        generator(options.seed, self.op.name, name).shuffle(order)
        samples = self.samples.setdefault(name, {})
        clock = None
        for case_name in order:
            if case_name in samples:
                continue  # measured before the session was resumed
            fresh: list[timing.Sample] = []
            orders = balanced_orders(options.seed, self.op.name, case_name, name, options.iters)
            pairs = list(enumerate(orders))
            graphs = timing.builds(
                self.op, self.op.incumbent(), config, self.cases[case_name], self.device
            )
            for build, (a, b) in enumerate(graphs):
                if not same_bits(a.output, b.output):
                    return Parity("tolerance", f"{case_name}: other bits than the incumbent")
                if clock is None:
                    clock = timing.busy_clock(a, self.device)
                fresh += timing.sample_pairs(
                    a,
                    b,
                    pairs[build :: timing.BUILDS],
                    -(-options.warmup // timing.BUILDS),
                    options.timing_min_ms,
                    options.timing_max_ms,
                )
                last = a
            samples[case_name] = fresh
            records.append_samples(self.pairs_file, name, case_name, fresh)
        if clock is not None:
            after = timing.busy_clock(last, self.device)
            self.env["clocks_before"] = self.env["clocks_before"] or clock
            self.env["clocks_after"] = after
            if after is not None and after < clock * (1 - CLOCK_DROP):
                self.clock_drops[name] = f"the SM clock fell from {clock} to {after} MHz"
        self.results[name] = statistics.compare(
            {
                case: [statistics.log_ratio(s.ms_a, s.ms_b) for s in taken]
                for case, taken in samples.items()
            },
            options.seed,
        )
        return Parity("exact", None)

    def measure(self) -> None:
        self.samples = records.keep_complete(self.pairs_file, self.options.iters)
        self.time(CONTROL, self.op.incumbent())
        print_result(CONTROL, self.results[CONTROL])
        for candidate in self.alive():
            try:
                parity = self.time(candidate.id, candidate.config)
            except Exception as error:  # a shape that asks too much of the card
                parity = Parity("failed", f"does not run: {error!r}")
            self.reject(candidate.id, parity)
            if parity.parity == "exact":
                print_result(candidate.id, self.results[candidate.id])
            else:
                print(f"{candidate.id}: rejected, {parity.reason}", flush=True)

    def judge(self) -> statistics.Verdict:
        competitors = {
            c.id: self.results.get(c.id) for c in self.alive() if c.id not in self.clock_drops
        }
        return statistics.judge(self.results[CONTROL], competitors, self.gates)

    def confirm(self, winner: Candidate) -> bool:
        """The same comparison in a second process with another seed."""
        options = self.options
        only = options.output / "confirm-candidate.json"
        only.write_text(json.dumps([config_json(winner.config)]))
        command = [
            sys.executable, "-m", self.program, "--confirmation", "--op", self.op.name,
            "--source", str(options.source), "--output", str(options.output / "confirm"),
            "--case-set", options.case_set, "--warmup", str(options.warmup),
            "--iters", str(options.iters), "--timing-min-ms", str(options.timing_min_ms),
            "--timing-max-ms", str(options.timing_max_ms), "--seed", str(options.seed + 1),
            "--device", options.device, "--candidates", str(only), "--resume",
        ]  # fmt: skip
        subprocess.run(command, check=False)
        file = options.output / "confirm" / "session.json"
        return file.exists() and json.loads(file.read_text())["status"] == "winner"

    def winner_record(self, winner: Candidate) -> dict[str, Any]:
        result = self.results[winner.id]
        return {
            "schema": records.SCHEMA,
            "op": self.op.name,
            "gpu": self.env["gpu"],
            "sm": self.env["sm"],
            "source_sha256": launch_table.source_sha256(self.op.family),
            "config": config_json(winner.config),
            "replaces": config_id(self.op.incumbent()),
            "geomean": result.geomean,
            "ci95_low": result.ci_low,
            "worst": result.worst._asdict(),
            "session_sha256": records.sha256(self.options.output / "session.json"),
        }


def _aot_json(fit: Fit) -> dict[str, int]:
    return {"shared": fit.shared, "regs": fit.regs, "spill": fit.spill}


def _case_json(case: str, samples: Sequence[timing.Sample], speedup: float) -> dict[str, Any]:
    """`mean_ms_*`: of one launch."""
    logs = [statistics.log_ratio(s.ms_a, s.ms_b) for s in samples]
    low = math.exp(fmean(logs) - statistics.t_margin(logs))
    return {
        "case": case,
        "n_pairs": len(samples),
        "inner": samples[0].inner,
        "mean_ms_a": fmean(s.ms_a / s.inner for s in samples),
        "mean_ms_b": fmean(s.ms_b / s.inner for s in samples),
        "speedup": speedup,
        "ci95_low": low,
    }


def print_result(name: str, result: statistics.Comparison) -> None:
    print(
        f"{name}: {result.geomean:.3f}x, 95 % bound {result.ci_low:.3f}, "
        f"worst {result.worst.speedup:.3f} ({result.worst.case})",
        flush=True,
    )


def run(session: Session) -> str:
    """Everything after argument checks; returns the status. session.json is written on the way."""
    options = session.options
    folder = options.output
    records.open_folder(folder, options.resume)
    session.env = describe_environment(None)
    session.filter()
    if not options.dry_run:
        session.device = torch.device(options.device)
        session.env = describe_environment(session.device)
    begun = session.record("error", None, "not finished")
    records.check_same_session(folder, begun)
    records.write_json(folder / "session.json", begun)
    try:
        return conclude(session)
    except Exception as error:
        records.write_json(folder / "session.json", session.record("error", None, repr(error)))
        raise


def conclude(session: Session) -> str:
    folder = session.options.output
    session.check_small_cases()
    if session.options.dry_run:
        records.write_json(folder / "session.json", session.record("dry_run", None))
        return "dry_run"
    session.measure()
    status, winner = session.judge()
    note = None
    chosen = next((c for c in session.candidates if c.id == winner), None)
    if chosen and not session.options.confirmation:
        torch.cuda.empty_cache()
        if not session.confirm(chosen):
            status, winner, note = "no_improvement", None, f"{chosen.id} was not confirmed"
    records.write_json(folder / "session.json", session.record(status, winner, note))
    if status == "winner" and chosen and not session.options.confirmation:
        records.write_json(folder / "winner.json", session.winner_record(chosen))
    return status
