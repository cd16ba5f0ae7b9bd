"""Ends the server, with one sentence, when a rank dies or is stopped.

A rank that is gone takes the others along: with gloo they fail over a closed connection, with NCCL
they wait inside a kernel, and behind a stopped rank they wait in both. SGLang sees a dead process
within a second once the server is up, but not a stopped one; its error may come after those of
ranks that are only victims; and as it kills itself, its shared memory stays. So a thread of the
launcher watches the ranks from the moment they are started, says which one it was, and cleans up.
Where ranks sum through the memory of the host, they note there whom they have waited for in vain.
Any other rank that runs but never finishes a step ends by SGLang's own `--watchdog-timeout`.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
from sglang.srt.utils import kill_process_tree

from dspark.kernels.collective import host_file
from dspark.kernels.collective.host_sum import LIMIT_S

TICK_S = 0.5
STOPPED_TICKS = 10  # a rank stopped this many looks in a row is not coming back
BLAME_S = 1.0  # a rank that fails over another one's death may be seen first
GRACE_S = 0.05  # where this process kills all its children, it is gone itself before that
REAP_S = 10.0
SHARED = Path("/dev/shm")
# What SGLang, multiprocessing, NCCL and we ourselves put there.
SEMAPHORE = "sem.mp-"
PREFIXES = ("sgl_shm_", "sglang_loads_", SEMAPHORE, "nccl-", "dspark-")


class RankWatch:
    """Watches the rank processes of this launcher; `fault` says what is wrong with one.

    Args:
        processes: one a rank, started by this process.
        first: number of the first of them; not 0 on the second machine of a server.
    """

    def __init__(self, processes: Sequence[BaseProcess], first: int):
        self._processes = processes
        self._first = first
        self._looks_stopped = [0] * len(processes)
        self._memory = SharedMemory()
        self._over = threading.Event()  # ranks may end from now on
        self._ending = threading.Lock()  # whoever holds it ends the server

    def start(self) -> threading.Thread:
        """The thread that watches; it ends when all ranks have."""
        thread = threading.Thread(target=self._run, daemon=True, name="rank-watch")
        thread.start()
        return thread

    def stop(self) -> None:
        """The server is about to end: ranks may go, and shared memory needs its names no more.

        Semaphores of ranks keep theirs: a rank that ends in order removes them itself, and says
        so loudly where somebody else did. What one leaves is removed once all have gone.
        """
        self._memory.look(self._pids())
        own = mapped(os.getpid())
        self._memory.unlink(lambda name: name in own or not name.startswith(SEMAPHORE))
        self._over.set()

    def end_if_a_rank_is_gone(self, wait_s: float) -> None:
        """Does not return if a rank is found dead within `wait_s`."""
        deadline = time.monotonic() + wait_s
        while not self._over.is_set():
            if fault := self.dead():
                self._end(fault)
            if time.monotonic() >= deadline:
                return
            time.sleep(TICK_S / 10)

    def dead(self) -> str | None:
        """One sentence about the first rank whose process has ended; None if all run."""
        for rank, process in enumerate(self._processes, self._first):
            if (status := process.exitcode) is not None:
                return f"Rank {rank} (process {process.pid}) {describe(status)}"
        return None

    def stopped(self) -> str | None:
        """One sentence about a rank that was found stopped in each of the last looks.

        Looks are counted, not seconds: where a shell stops and continues the whole server, this
        process was stopped as well.
        """
        for i, process in enumerate(self._processes):
            self._looks_stopped[i] = self._looks_stopped[i] + 1 if is_stopped(process) else 0
            if self._looks_stopped[i] >= STOPPED_TICKS:
                seconds = STOPPED_TICKS * TICK_S
                return (
                    f"Rank {self._first + i} (process {process.pid}) was stopped by a signal and "
                    f"has not run for {seconds:.0f} s"
                )
        return None

    def missing(self) -> str | None:
        """One sentence about a rank that others have waited for in vain in a sum.

        All of them hold the file open in which they note it.
        """
        first = self._processes[0].pid
        if first and (fault := host_file.fault_of(first)):
            waited = ", ".join(str(self._first + rank) for rank in fault.waited)
            return (
                f"Rank {self._first + fault.missing} did not join a sum over the ranks in "
                f"{LIMIT_S:.0f} s (waited for by rank {waited})"
            )
        return None

    def _run(self) -> None:
        sentinels = [process.sentinel for process in self._processes]
        while not self._over.is_set():
            connection.wait(sentinels, timeout=TICK_S)  # returns at once when a process ends
            self._memory.look_if_changed(self._pids())
            fault = self.dead() or self.stopped() or self.missing()
            if fault and not self._over.wait(GRACE_S):
                self._end(fault)
        for sentinel in sentinels:
            connection.wait([sentinel])
        self._memory.unlink()

    def _end(self, fault: str) -> None:
        """Say it, kill what is left, and end this process with status 1."""
        self._ending.acquire()  # never released: the other thread's process ends here
        print(f"dspark: {fault}; the server ends.", file=sys.stderr, flush=True)
        self._memory.look(self._pids())
        with contextlib.suppress(RuntimeError):  # some are left: nothing more can be done
            kill_process_tree(os.getpid(), include_parent=False, wait_timeout=REAP_S)
        self._memory.unlink()
        os._exit(1)

    def _pids(self) -> list[int]:
        return [os.getpid(), *(process.pid for process in self._processes if process.pid)]


class SharedMemory:
    """Files in /dev/shm that this server's processes have mapped."""

    def __init__(self) -> None:
        self._ours: set[str] = set()
        self._listed: set[str] = set()
        self._looks_due = 0

    def look_if_changed(self, pids: Iterable[int]) -> None:
        """`look`, twice after anything has come or gone: a new file is mapped a little later."""
        if (names := listed()) != self._listed:
            self._listed, self._looks_due = names, 2
        if self._looks_due:
            self._looks_due -= 1
            self.look(pids)

    def look(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self._ours |= mapped(pid)

    def unlink(self, chosen: Callable[[str], bool] = lambda name: True) -> None:
        """Remove the chosen names; processes that still have a file mapped keep its memory."""
        for name in filter(chosen, self._ours):
            (SHARED / name).unlink(missing_ok=True)


def listed() -> set[str]:
    """Names in /dev/shm that may be a server's."""
    return {name for name in os.listdir(SHARED) if name.startswith(PREFIXES)}


def mapped(pid: int) -> set[str]:
    """Names in /dev/shm that a process has mapped and that may be a server's.

    Files are told apart by inode: a semaphore is mapped before it gets the name that stays.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended
        return set()
    inodes = {int(line.split(maxsplit=5)[4]) for line in lines if f"{SHARED}/" in line}
    found = set()
    for name in listed():
        with contextlib.suppress(FileNotFoundError):  # another server's, just removed
            if (SHARED / name).stat().st_ino in inodes:
                found.add(name)
    return found


def is_stopped(process: BaseProcess) -> bool:
    try:
        return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def describe(status: int) -> str:
    """How a process ended, by `BaseProcess.exitcode`."""
    if status == -signal.SIGKILL:
        return "was killed by SIGKILL, as the kernel does where host memory runs out"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    if status == 0:
        return "ended over the error that it has logged above"
    return f"ended with status {status}"


_watch: RankWatch | None = None


def begin(processes: Sequence[BaseProcess], first: int) -> None:
    """Watch the ranks from now on, also when one of them reports an error by SIGQUIT."""
    global _watch
    _watch = RankWatch(processes, first)
    _watch.start()
    handler = signal.getsignal(signal.SIGQUIT)
    if callable(handler) and threading.current_thread() is threading.main_thread():

        def blame_first(number, frame):
            blame()
            stop()
            handler(number, frame)

        signal.signal(signal.SIGQUIT, blame_first)


def blame() -> None:
    """A rank has failed: end the server by name of the one that is gone, if one is."""
    if _watch is not None:
        _watch.end_if_a_rank_is_gone(BLAME_S)


def stop() -> None:
    if _watch is not None:
        _watch.stop()


def is_of_server(watchdog) -> bool:
    """Whether SGLang's SubprocessWatchdog is the one that watches the processes of a server."""
    return _watch is not None and any(n.startswith("detokenizer") for n in watchdog._names)


def leave_ranks_out(watchdog) -> None:
    """Have SGLang's SubprocessWatchdog watch what is no rank."""
    rest = [
        (process, name)
        for process, name in zip(watchdog._processes, watchdog._names, strict=True)
        if not name.startswith("scheduler_")
    ]
    watchdog._processes, watchdog._names = ([pair[i] for pair in rest] for i in (0, 1))
