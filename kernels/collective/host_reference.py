"""The protocol of the sum through host memory in torch: what `host_kernel.py` does, step by step.

A rank's sum is one or more programs, as the kernel's are. A program is a generator that yields
wherever another rank may act in between, so a test decides who goes on: real processes over one
file, or all ranks of one process in an order drawn at random.
"""

from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.kernels.collective.host_layout import (
    GROUP,
    PUBLISHED,
    REDUCED,
    Layout,
    Views,
    flag_of,
    has_arrived,
    slot_of,
    views,
)
from dspark.kernels.collective.reference import ordered_sum

Program = Generator[None, None, None]
PIECE = 8  # bf16 that arrive at once


class Member(NamedTuple):
    """One rank of a sum."""

    views: Views
    layout: Layout
    rank: int
    epochs: list[int]  # last epoch of each channel
    now: Callable[[], float]
    limit: float  # of `now`, how long to wait for the others

    @property
    def gave_up(self) -> bool:
        return bool(self.views.fault[self.rank].any())


def programs(partial: Tensor, out: Tensor, member: Member) -> list[Program]:
    """What sums `partial` bf16 [T, columns] over the ranks into `out`; NaN without some rank."""
    if len(partial) == 1:
        return [one_shot(partial, out, member)]
    return [
        two_shot(partial[first : first + GROUP], out[first : first + GROUP], first, member)
        for first in range(0, len(partial), GROUP)
    ]


def run(all_programs: Iterable[Program]) -> None:
    """To their ends, turn and turn about."""
    waiting = list(all_programs)
    while waiting:
        waiting = [program for program in waiting if not _has_ended(program)]


def one_shot(partial: Tensor, out: Tensor, member: Member) -> Program:
    v, channel = member.views, 0
    epoch = member.epochs[channel] + 1
    rows = v.slot[:, slot_of(epoch), :1].view(torch.bfloat16)  # [ranks, 1, columns]
    yield from store(rows[member.rank], partial)
    yield from meet(channel, PUBLISHED, epoch, member)
    total = ordered_sum((yield from load(rows)))
    out.copy_(total.fill_(torch.nan) if member.gave_up else total)
    member.epochs[channel] = epoch


def two_shot(partial: Tensor, out: Tensor, first: int, member: Member) -> Program:
    """Rows `first`.. of a sum."""
    v, rank, ranks = member.views, member.rank, member.layout.ranks
    channel = 1 + first // GROUP
    epoch = member.epochs[channel] + 1
    count, cut = len(partial), member.layout.columns // ranks
    rows = v.slot[:, slot_of(epoch), 1 + first :][:, :count].view(torch.bfloat16)
    sums = v.part[:, slot_of(epoch), first:][:, :count].view(torch.bfloat16)
    yield from store(rows[rank], partial)
    yield from meet(channel, PUBLISHED, epoch, member)
    mine = yield from load(rows[..., rank * cut : (rank + 1) * cut])
    yield from store(sums[rank], ordered_sum(mine))
    yield from meet(channel, REDUCED, epoch, member)
    whole = (yield from load(sums)).transpose(0, 1).reshape(out.shape)
    out.copy_(whole.fill_(torch.nan) if member.gave_up else whole)
    member.epochs[channel] = epoch


def store(place: Tensor, values: Tensor) -> Program:
    """Piece by piece: the others see no whole rows before a flag."""
    for row, line in zip(place, values, strict=True):
        for start in range(0, len(row), PIECE):
            row[start : start + PIECE] = line[start : start + PIECE]
            yield


def load(places: Tensor) -> Generator[None, None, Tensor]:
    """[ranks, ...], one rank after the other."""
    seen = []
    for place in places:
        seen.append(place.clone())
        yield
    return torch.stack(seen)


def meet(channel: int, phase: int, epoch: int, member: Member) -> Program:
    """Say that this rank has arrived, and wait for the others or give up."""
    flags = member.views.flag[channel, phase, slot_of(epoch)]
    flags[member.rank] = flag_of(epoch)
    end = member.now() + member.limit
    if member.gave_up:
        return
    for rank in range(member.layout.ranks):
        while not has_arrived(int(flags[rank]), epoch):
            if member.now() >= end:
                member.views.fault[member.rank, rank] = 1 + channel
                break
            yield


def _has_ended(program: Program) -> bool:
    return next(program, program) is program


def member(
    memory: Tensor,
    layout: Layout,
    rank: int,
    now: Callable[[], float],
    limit: float,
    epochs: list[int],
) -> Member:
    """memory: u8 [layout.nbytes]."""
    return Member(views(memory, layout), layout, rank, epochs, now, limit)
