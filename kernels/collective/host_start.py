"""Set up the sum through host memory, or say why the ranks keep to `torch.distributed`.

Whatever one rank cannot do, all of them do without: they agree after each step. Nothing that goes
wrong here ends a server.
"""

import contextlib
import logging
import random
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from dspark.kernels.collective import host_file, transport
from dspark.kernels.collective.host_layout import MOST_RANKS, MOST_ROWS, Layout, fits
from dspark.kernels.collective.host_sum import CHOSEN, LIMIT_S, HostSum, host_sum_of
from dspark.kernels.collective.reference import ordered_sum
from dspark.kernels.common.dispatch import use_triton

logger = logging.getLogger(__name__)
Group = dist.ProcessGroup
Result = TypeVar("Result")

NAME_BYTES = 64
TESTED_ROWS = (1, 6, MOST_ROWS)
EPOCHS = 1000
TEST_LIMIT_S = 2.0
INPUTS = 4  # different sums of each size
DELAY_CYCLES = 20_000  # at most, some ten microseconds
PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped


class Refused(Exception):
    """Some rank cannot; the message says which and why, and is the same on every rank."""


class Outcome(NamedTuple):
    chosen: HostSum | None
    reason: str  # why not


def set_up(group: Group, device: torch.device, columns: int) -> Outcome:
    """Have `tp_sum` of `group` go through host memory, if every rank can and gets right sums.

    Called by all ranks at once, before any graph is captured. columns: of the model's rows.
    """
    rank, ranks = group.rank(), group.size()
    if not use_triton(torch.empty(0, device=device)):
        return Outcome(None, "the kernels are not in use")
    if not fits(ranks, columns):
        return Outcome(None, f"it takes 2 to {MOST_RANKS} ranks that divide {columns} columns")
    layout = Layout(ranks, columns)
    try:
        memory = shared_file(group, device, layout)
    except Refused as refused:
        return Outcome(None, str(refused))
    try:
        together(lambda: register(memory, device), group, device)
        sums = together(lambda: host_sum_of(memory, layout, rank, device), group, device)
        self_test(sums, group)
    except Refused as refused:
        let_go(memory, device)
        return Outcome(None, str(refused))
    sums.views.serving[0] = 1
    CHOSEN[group] = sums
    return Outcome(sums, "")


def shared_file(group: Group, device: torch.device, layout: Layout) -> Tensor:
    """u8 [layout.nbytes], one file that all ranks have mapped; it has no name any more.

    Raises:
        Refused: some rank cannot have it.
    """
    rank = group.rank()
    names: list[str] = []  # of rank 0, which maps the file at once: a launcher knows what is mapped
    own: list[Tensor] = []

    def create() -> None:
        if rank == 0:
            names.append(host_file.create(layout))
            own.append(host_file.attach(names[0], layout, rank))

    def attach() -> None:
        if rank != 0:
            own.append(host_file.attach(name, layout, rank))

    try:
        together(create, group, device)
        name = name_of_first("".join(names), group, device)
        together(attach, group, device)
    finally:
        for given in names:
            host_file.remove(given)
    return own[0]


def register(memory: Tensor, device: torch.device) -> None:
    """Lock the pages of u8 [n] and let the card address them.

    Raises:
        RuntimeError: the driver refuses.
    """
    if device.type != "cuda":  # the interpreter reads them as they are
        return
    cudart = torch.cuda.cudart()
    code = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE_MAPPED)
    if code != cudart.cudaError.success:
        forget_last_error(device)
        raise RuntimeError(f"cudaHostRegister: {cudart.cudaGetErrorString(code)}")


def let_go(memory: Tensor, device: torch.device) -> None:
    """Undo `register`, as far as it came."""
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(device)
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        forget_last_error(device)


def forget_last_error(device: torch.device) -> None:
    """CUDA reports a failed call once more, at the next launch, which would take it for its own."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def self_test(sums: HostSum, group: Group) -> None:
    """Sum known rows, one rank late now and then, and compare with `ordered_sum`.

    Raises:
        Refused: a sum was wrong, or a rank did not come.
    """
    device = sums.epochs.device
    cases = [case for rows in TESTED_ROWS for case in cases_of(rows, sums)]

    def compile_all() -> None:
        # A card that loads a kernel stands still, so nobody may be waiting for it.
        sums.wait_at_most(0)
        for case in cases:
            wrong_words(sums(case.mine), case.total)
        delay(device, 1)
        int(sums.epochs[0])  # all of it has run

    def sum_all() -> None:
        sums.wait_at_most(TEST_LIMIT_S)
        late = random.Random(sums.rank)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for epoch in range(EPOCHS):
            case = cases[epoch % len(cases)]
            delay(device, late.randrange(1, DELAY_CYCLES))
            wrong += wrong_words(sums(case.mine), case.total)
        if sums.gave_up:
            missing = [int(rank) for rank in sums.views.fault[sums.rank].nonzero()]
            raise RuntimeError(f"waited in vain for rank {', '.join(map(str, missing))}")
        if count := int(wrong):
            raise RuntimeError(f"{count} of its numbers were wrong in {EPOCHS} sums")
        sums.wait_at_most(LIMIT_S)

    together(compile_all, group, device)
    together(sum_all, group, device)


class Case(NamedTuple):
    mine: Tensor  # bf16 [rows, columns] of this rank
    total: Tensor


def cases_of(rows: int, sums: HostSum) -> list[Case]:
    """The same on every rank, INPUTS of them. Numbers of many sizes, so that the order counts."""
    shape = (INPUTS, sums.layout.ranks, rows, sums.layout.columns)
    generator = torch.Generator().manual_seed(rows)
    # Named, since a loader may have set other defaults.
    plain: Any = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    partials = (torch.randn(shape, **plain) * torch.randn(shape, **plain).exp2()).bfloat16()
    device = sums.epochs.device
    return [Case(each[sums.rank].to(device), ordered_sum(each).to(device)) for each in partials]


def wrong_words(total: Tensor, expected: Tensor) -> Tensor:
    """i64 [] bit patterns that differ, on the device."""
    return (total.view(torch.int16) != expected.view(torch.int16)).sum()


def delay(device: torch.device, cycles: int) -> None:
    """Let the card wait before its next launch."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(cycles)


def together(step: Callable[[], Result], group: Group, device: torch.device) -> Result:
    """Run `step` on every rank; its result, if no rank failed.

    Raises:
        Refused: on every rank, if one has failed. Why, the failing rank has logged.
    """
    result, error = None, None
    try:
        result = step()
    except Exception as raised:
        error = raised
        logger.warning("Sum through host memory, rank %d: %s", group.rank(), one_line(raised))
    failed = torch.tensor([error is not None], dtype=torch.uint8, device=device)
    ranks = transport.gather(failed, group, "set-up").flatten().nonzero().flatten().tolist()
    if ranks:
        raise Refused(f"rank {', '.join(map(str, ranks))} could not") from error
    return result  # type: ignore[return-value]


def name_of_first(name: str, group: Group, device: torch.device) -> str:
    """What rank 0 calls the file, on every rank."""
    padded = torch.tensor(list(name.encode().ljust(NAME_BYTES)), dtype=torch.uint8, device=device)
    return bytes(transport.gather(padded, group, "set-up")[0].tolist()).decode().strip()


def one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)
