"""What the launcher sees of its ranks, and which shared memory it takes for its own."""

import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dspark.host import rank_watch
from dspark.host.rank_watch import SHARED, STOPPED_TICKS, RankWatch, SharedMemory
from dspark.kernels.collective import host_file, host_layout


def ended(status: int | None, pid: int = 77) -> SimpleNamespace:
    return SimpleNamespace(exitcode=status, pid=pid)


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (-9, "was killed by SIGKILL, as the kernel does where host memory runs out"),
        (-11, "was killed by SIGSEGV"),
        (3, "ended with status 3"),
        (0, "ended over the error that it has logged above"),
    ],
)
def test_the_rank_that_is_gone_is_named(status, how):
    """The second machine of a server counts on."""
    watch = RankWatch([ended(None), ended(status)], first=4)
    assert watch.dead() == f"Rank 5 (process 77) {how}"
    assert RankWatch([ended(None), ended(None)], first=4).dead() is None


@pytest.fixture
def sleeper():
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        yield process
        process.kill()


def stop_process(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)  # returns when it has stopped


def test_a_rank_is_given_up_when_it_was_found_stopped_often_enough(sleeper):
    watch = RankWatch([ended(None, os.getpid()), ended(None, sleeper.pid)], first=0)
    assert watch.stopped() is None
    stop_process(sleeper.pid)
    assert [watch.stopped() for _ in range(STOPPED_TICKS - 1)] == [None] * (STOPPED_TICKS - 1)
    assert watch.stopped() == (
        f"Rank 1 (process {sleeper.pid}) was stopped by a signal and has not run for 5 s"
    )


def test_a_rank_that_goes_on_is_not_given_up(sleeper):
    watch = RankWatch([ended(None, sleeper.pid)], first=0)
    for _ in range(3):
        stop_process(sleeper.pid)
        assert [watch.stopped() for _ in range(STOPPED_TICKS - 1)] == [None] * (STOPPED_TICKS - 1)
        os.kill(sleeper.pid, signal.SIGCONT)
        os.waitpid(sleeper.pid, os.WCONTINUED)
        assert watch.stopped() is None


def test_only_shared_memory_that_is_mapped_is_removed():
    names = [f"{start}_test_{os.getpid()}" for start in ("sgl_shm_", "dspark-", "sgl_shm_x", "my")]
    ours, also_ours, of_another_server, of_somebody = (SHARED / name for name in names)
    memory = SharedMemory()
    memory.look_if_changed([os.getpid()])
    maps = []
    try:
        for file in (ours, also_ours, of_another_server, of_somebody):
            file.write_bytes(bytes(4096))
            if file != of_another_server:
                with file.open("r+b") as stream:
                    maps.append(mmap.mmap(stream.fileno(), 4096))
        memory.look_if_changed([os.getpid(), 2**22 + 1])  # a process that is gone has none
        memory.unlink()
        assert [f.exists() for f in (ours, also_ours)] == [False, False]
        assert [f.exists() for f in (of_another_server, of_somebody)] == [True, True]
    finally:
        for file in (ours, also_ours, of_another_server, of_somebody):
            file.unlink(missing_ok=True)


def test_a_semaphore_is_found_under_the_name_it_keeps():
    before = rank_watch.listed()
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    mine = rank_watch.mapped(os.getpid()) - before
    assert len(mine) == 1
    assert mine.pop().startswith("sem.mp-")
    del semaphore


def rank_with_a_semaphore(ends):
    semaphore = multiprocessing.get_context("spawn").Semaphore()  # others have no name
    ends.send(semaphore._semlock.name.removeprefix("/"))
    ends.recv()


@pytest.mark.parametrize("in_order", [True, False])
def test_a_rank_that_ends_in_order_removes_its_semaphores_itself(in_order, capfd):
    """Failed before: they were gone when it came to it, and every server ended in a traceback."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    rank = fork.Process(target=rank_with_a_semaphore, args=(theirs,), daemon=True)
    rank.start()
    name = f"sem.{ours.recv()}"
    watch = RankWatch([rank], first=0)
    thread = watch.start()
    watch.stop()
    assert (SHARED / name).exists()
    if in_order:
        ours.send("end")
    else:
        rank.kill()
    thread.join()
    rank.join()
    assert not (SHARED / name).exists()
    assert capfd.readouterr().err == ""


def test_sglang_watches_what_is_no_rank():
    stock = SimpleNamespace(_processes=[1, 2, 3], _names=["scheduler_0", "scheduler_1", "detok"])
    rank_watch.leave_ranks_out(stock)
    assert (stock._processes, stock._names) == ([3], ["detok"])


@pytest.fixture
def sums_of_two_ranks():
    """The memory through which ranks sum, held open by this process."""
    layout = host_layout.Layout(2, 64)
    name = host_file.create(layout)
    mapped = host_file.attach(name, layout, 0)
    host_file.remove(name)
    return host_layout.views(mapped, layout)


def test_a_rank_that_others_wait_for_in_vain_is_named(sums_of_two_ranks):
    """What the ranks note while they try their sums at start is no fault of a server."""
    watch = RankWatch([ended(None, os.getpid()), ended(None)], first=4)
    assert watch.missing() is None
    sums_of_two_ranks.fault[0, 1] = 3
    assert watch.missing() is None
    sums_of_two_ranks.serving[0] = 1
    assert watch.missing() == (
        "Rank 5 did not join a sum over the ranks in 60 s (waited for by rank 4)"
    )
    sums_of_two_ranks.fault.zero_()
    assert watch.missing() is None
