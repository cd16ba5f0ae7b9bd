"""Does a configuration give the same bits? Asked before any time is taken.

Run as a module under TRITON_INTERPRET=1 it answers for a machine without a GPU:

    echo '[{"num_warps": 2, ...}]' | python -m dspark.bench.tune.parity MODULE OP

prints {configuration id: {"parity": ..., "reason": ...}}.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from dspark.bench.tune.op import Check, TunedOp, config_id, config_json, configured, ops_of
from dspark.kernels.common.launch_table import LaunchConfig

Outputs = Mapping[str, torch.Tensor]  # check or case -> output


class Parity(NamedTuple):
    parity: str  # "exact", "tolerance": right but other bits, or "failed"
    reason: str | None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of every byte, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check_outputs(
    op: TunedOp, config: LaunchConfig, device: torch.device
) -> dict[str, torch.Tensor]:
    with configured(op, config):
        return {check.name: check.run(device) for check in op.checks}


def error_of(check: Check, output: torch.Tensor) -> float:
    """Relative root mean square error; infinite for a NaN or another shape."""
    want, got = check.expected().double(), output.double().cpu()
    if got.shape != want.shape or not torch.isfinite(got).all():
        return float("inf")
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def compare(op: TunedOp, incumbent: Outputs, candidate: Outputs) -> Parity:
    """Against the reference where there is one, and bit for bit against the incumbent."""
    for check in op.checks:
        error = error_of(check, candidate[check.name])
        if error > check.tolerance:
            reason = f"{check.name}: error {error:.2g} above {check.tolerance:.2g}"
            return Parity("failed", reason)
    for name, expected in incumbent.items():
        if not same_bits(candidate[name], expected):
            return Parity("tolerance", f"{name}: other bits than the incumbent")
    return Parity("exact", None)


def parity_here(
    op: TunedOp, configs: Sequence[LaunchConfig], device: torch.device
) -> dict[str, Parity]:
    """Small cases only, on a device that can run the kernels."""
    incumbent = check_outputs(op, op.incumbent(), device)
    return {
        config_id(config): compare(op, incumbent, check_outputs(op, config, device))
        for config in configs
    }


def parity_interpreted(
    module: str, op: TunedOp, configs: Sequence[LaunchConfig]
) -> dict[str, Parity]:
    """The same under the interpreter, which needs a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "dspark.bench.tune.parity", module, op.name],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        input=json.dumps([config_json(config) for config in configs]),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"the interpreter failed: {done.stderr.strip()[-2000:]}")
    return {name: Parity(**value) for name, value in json.loads(done.stdout).items()}


def main(module: str, name: str) -> None:
    from dspark.kernels.tooling import interpreter

    interpreter.install()
    op = next(op for op in ops_of(module) if op.name == name)
    configs = [LaunchConfig(**config) for config in json.load(sys.stdin)]
    found = parity_here(op, configs, torch.device("cpu"))
    print(json.dumps({name: parity._asdict() for name, parity in found.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
