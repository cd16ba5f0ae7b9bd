"""A rank that is killed or stopped, at any time: one sentence names it, and nothing stays."""

import os
import signal
import threading
import time

import psutil
import pytest
import requests
from serving.prompts import prompt
from serving.test_dspark_configurations import DSPARK
from serving.test_target_only import CHUNKED

from dspark.commands.local_server import LocalServer, ServerFailed
from dspark.host.rank_watch import SHARED, mapped

FLAGS = (*CHUNKED, *DSPARK, "--tp-size", "2")
END_S = 30
KILLED = "was killed by SIGKILL"
STOPPED = "was stopped by a signal"


def rank_process(launcher: int, rank: int) -> psutil.Process | None:
    """The process of a rank; SGLang names it as soon as it has been started."""
    for child in psutil.Process(launcher).children(recursive=True):
        try:
            if any(f"scheduler_TP{rank}" in word for word in child.cmdline()):
                return child
        except psutil.Error:
            continue
    return None


class Victim:
    """A server that is about to lose rank 1, and all that must be gone afterwards."""

    def __init__(self, launcher: psutil.Process):
        self.rank = rank_process(launcher.pid, 1)
        self.processes = [launcher, *launcher.children(recursive=True)]
        self.shared = set().union(*(mapped(process.pid) for process in self.processes))

    def assert_ended(self, wait, log: str) -> float:
        """Seconds until the server had ended over its rank 1, with nothing left of it."""
        started = time.monotonic()
        assert wait(END_S) == 1
        seconds = time.monotonic() - started
        left = [p for p in self.processes if p.is_running() and p.status() != "zombie"]
        assert left == []
        assert [name for name in self.shared if (SHARED / name).exists()] == []
        return seconds


def assert_one_sentence(log: str, what: str) -> None:
    (line,) = [line for line in log.splitlines() if "Rank 1" in line or "scheduler_1" in line]
    assert line.startswith("dspark: Rank 1 (process ")
    assert what in line
    assert line.endswith("; the server ends.")


def end(server: LocalServer, number: signal.Signals, what: str) -> None:
    victim = Victim(psutil.Process(server.process.pid))
    assert victim.rank is not None
    for kind in ("sgl_shm_", "sem.mp-"):
        assert any(name.startswith(kind) for name in victim.shared)
    victim.rank.send_signal(number)
    seconds = victim.assert_ended(server.process.wait, server.log())
    print(f"{number.name}: the server had ended after {seconds:.1f} s")
    assert_one_sentence(server.log(), what)


@pytest.fixture
def server(checkpoint):
    with LocalServer(checkpoint("none", "tiny-tp2"), FLAGS) as server:
        yield server


@pytest.mark.parametrize(
    ("number", "what"),
    [(signal.SIGKILL, KILLED), pytest.param(signal.SIGSTOP, STOPPED, marks=pytest.mark.deep)],
)
def test_in_a_decode_step(server, number, what):
    tokens = server.stream(prompt(40, seed=1), 2000)
    next(tokens)
    end(server, number, what)
    with pytest.raises((requests.RequestException, ServerFailed)):
        list(tokens)


@pytest.mark.deep
def test_while_idle(server):
    server.generate(prompt(40, seed=1), 4)
    server.flush_cache()  # waits for the step in flight
    end(server, signal.SIGKILL, KILLED)


@pytest.mark.deep
@pytest.mark.parametrize(("number", "what"), [(signal.SIGKILL, KILLED), (signal.SIGSTOP, STOPPED)])
def test_in_a_prompt(server, number, what):
    answers = []

    def ask():
        with pytest.raises(requests.RequestException):
            server.generate(prompt(1900, seed=2), 4)
        answers.append("cut off")

    asking = threading.Thread(target=ask)
    asking.start()
    while not server.load()["num_used_tokens"]:  # until its first chunk has been admitted
        assert asking.is_alive()
    end(server, number, what)
    asking.join(END_S)
    assert answers == ["cut off"]


@pytest.mark.deep
@pytest.mark.parametrize(("number", "what"), [(signal.SIGKILL, KILLED), (signal.SIGSTOP, STOPPED)])
def test_while_loading(checkpoint, tmp_path, number, what):
    """Before the server has ever answered; rank 0 waits for rank 1 then."""
    log, victims = tmp_path / "log", []

    def strike():
        while not victims:
            for child in psutil.Process(os.getpid()).children():
                found = child.is_running() and rank_process(child.pid, 1)
                if found:
                    victims.append(Victim(child))
                    found.send_signal(number)

    striking = threading.Thread(target=strike)
    striking.start()
    with pytest.raises(ServerFailed, match="ended during start-up"):
        LocalServer(checkpoint("none", "tiny-tp2"), FLAGS, log=log)
    striking.join()
    left = [p for p in victims[0].processes[1:] if p.is_running() and p.status() != "zombie"]
    assert left == []
    assert_one_sentence(log.read_text(), what)
