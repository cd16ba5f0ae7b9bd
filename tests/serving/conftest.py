"""Servers for black-box tests: one per set of flags, shared by every test that asks for it.

A start costs half a minute, nearly all of it imports. `serving(flags, env)` hands out a running
server; at most two stay alive, so tests of one flag set belong together.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from dspark import embedded
from dspark.commands.local_server import LocalServer
from dspark.target.checkpoint import presets
from dspark.target.checkpoint.make import ACCEPTANCE, make_checkpoint

KEPT_ALIVE = 2
# SGLang's own checks, turned from warnings into failures of the server.
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Function (acceptance, preset) -> directory of a small checkpoint, written once.

    The preset `embedded` is the trained one that ships with the package.
    """
    root = tmp_path_factory.mktemp("serving")

    def make(acceptance: str = "none", preset: str = "tiny") -> Path:
        if preset == "embedded":
            return embedded.checkpoint()
        directory = root / f"{preset}-{acceptance}"
        if not directory.exists():
            config, alpha = presets.PRESETS[preset](), ACCEPTANCE[acceptance]
            make_checkpoint(directory, config, alpha=alpha, shard_bytes=2 << 20)
        return directory

    return make


@pytest.fixture(scope="session")
def tiny(checkpoint) -> Path:
    """TINY whose every layer counts fully, so that a wrong key or value changes tokens."""
    return checkpoint()


@pytest.fixture(scope="session")
def serving(checkpoint, tmp_path_factory):
    """Function (flags, env, acceptance, preset) -> running LocalServer.

    env is a tuple of (name, value) pairs.
    """
    running: OrderedDict[tuple, LocalServer] = OrderedDict()
    logs = tmp_path_factory.mktemp("logs")
    # SGLang takes seconds to end, nearly all of them asleep: the next server starts meanwhile.
    background = ThreadPoolExecutor(1)
    endings: list[Future] = []

    def start(
        flags: tuple[str, ...] = (),
        env: tuple[tuple[str, str], ...] = (),
        acceptance: str = "none",
        preset: str = "tiny",
    ) -> LocalServer:
        key = (flags, env, acceptance, preset)
        server = running.pop(key, None)
        if server is None or not server.alive():
            while len(running) >= KEPT_ALIVE:
                endings.append(background.submit(end, running.popitem(last=False)[1]))
            log = logs / f"server-{len(list(logs.iterdir()))}.log"
            model = checkpoint(acceptance, preset)
            server = LocalServer(model, flags, STRICT | dict(env), log=log)
        running[key] = server
        return server

    yield start
    endings += [background.submit(end, server) for server in running.values()]
    for ending in endings:
        ending.result()


def end(server: LocalServer) -> None:
    """Stop a server, which must have nothing to complain about while it ends."""
    before = len(server.log())
    server.stop()
    assert "Traceback" not in server.log()[before:]


@pytest.fixture
def run_serve():
    """Function (arguments) -> finished `dspark serve` that was expected to refuse."""

    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "dspark.cli", "serve", *arguments],
            env=os.environ | STRICT,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.fixture
def changed_config(tiny, tmp_path):
    """Function (change) -> copy of TINY whose config.json went through `change`."""

    def copy(change) -> Path:
        directory = tmp_path / "changed"
        shutil.copytree(tiny, directory)
        file = directory / "config.json"
        config = json.loads(file.read_text())
        change(config)
        file.write_text(json.dumps(config))
        return directory

    return copy
