"""A fixed set of jobs served in any order, to compare whole runs."""

from typing import NamedTuple

from torch import Tensor

from .device import PAGE
from .server import Request, Server


class Job(NamedTuple):
    prompt: tuple[int, ...]
    more: int  # tokens to generate
    accepts: tuple[int, ...]  # commits of its verify steps, repeated
    killed_after: int | None = None  # verify steps until somebody aborts it

    @property
    def length(self) -> int:
        return len(self.prompt) + self.more


def serve(
    server: Server, jobs: list[Job], order: list[int], concurrency: int, chunk: int = 600
) -> dict[int, list[Tensor]]:
    """Run the jobs; returns per finished job the entries of its first `length` tokens."""
    waiting = list(order)
    running: dict[int, Request] = {}
    steps: dict[int, int] = {}
    finished: dict[int, list[Tensor]] = {}
    while waiting or running:
        while waiting and len(running) < concurrency:
            request = server.admit(list(jobs[waiting[0]].prompt))
            if request is None:
                break
            steps[waiting[0]] = 0
            running[waiting.pop(0)] = request
        server.chunk(chunk, concurrency)
        _verify(server, jobs, running, steps)
        for number, request in list(running.items()):
            job = jobs[number]
            killed = job.killed_after is not None and steps[number] >= job.killed_after
            if killed or request.host_len >= job.length:
                if not killed:
                    finished[number] = entries(server, request, job.length)
                server.abort(request)
                del running[number]
    server.settle()
    server.check()
    return finished


def _verify(server: Server, jobs, running: dict[int, Request], steps: dict[int, int]) -> None:
    number_of = {id(request): number for number, request in running.items()}
    batch = [number_of[id(request)] for request in server.live if request.running]
    accepts = [jobs[n].accepts[steps[n] % len(jobs[n].accepts)] for n in batch]
    for number in batch:
        steps[number] += 1
    server.verify(accepts or [1], [server.state.geometry.verify_width])


def entries(server: Server, request: Request, length: int) -> list[Tensor]:
    """Entries [layers, n, terms] of positions below `length`, one tensor per kind."""
    server.stream.drain()
    result = []
    for kind, pool in server.device.entries.items():
        ratio = 128 if kind == "c128" else 4
        per_page = PAGE // ratio
        slots = [
            request.full[k // per_page] * per_page + k % per_page for k in range(length // ratio)
        ]
        result.append(pool[:, slots].clone())
    return result
