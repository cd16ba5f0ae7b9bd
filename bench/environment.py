"""Where a figure was measured: without this it cannot be compared with any other."""

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "sglang", "sglang-dspark", "vllm")
GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")
REPOSITORY = Path(__file__).resolve().parent.parent


def describe(flags: list[str] | None = None) -> dict[str, Any]:
    """A JSON-ready record. `flags`: what the measured server was started with."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command_line(),
        "flags": flags,
        "source": source(REPOSITORY),
        "python": platform.python_version(),
        "packages": {name: v for name in PACKAGES if (v := package_version(name))},
        "cpu": {
            "model": cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[0],
        },
        "gpus": gpus(),
        "p2p": p2p(),
    }


def command_line() -> str:
    """This process's command, as one would type it, without the folders of absolute paths."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", spec.name] if spec else [sys.argv[0]]
    words = [*program, *sys.argv[1:]]
    return shlex.join(Path(word).name if word.startswith("/") else word for word in words)


def source(checkout: Path) -> dict[str, Any]:
    """Commit of a checkout and whether tracked files differ from it; None outside of git.

    A copy without its git folder can be given its commit as DSPARK_COMMIT.
    """
    commit = _output("git", "-C", str(checkout), "rev-parse", "HEAD")
    commit = commit or os.environ.get("DSPARK_COMMIT")
    changes = _output("git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def gpus() -> list[dict[str, str]]:
    """One record a card, clocks in MHz as they are right now; empty without a driver."""
    text = _output(
        "nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"
    )
    return [
        dict(zip(GPU_FIELDS, map(str.strip, line.split(",")), strict=False))
        for line in (text or "").splitlines()
    ]


def p2p() -> str | None:
    """Which pairs of cards may read each other's memory, as the driver prints it."""
    text = _output("nvidia-smi", "topo", "-p2p", "r")
    return text and re.sub(r"\x1b\[[0-9;]*m", "", text)  # it underlines even into a pipe


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
