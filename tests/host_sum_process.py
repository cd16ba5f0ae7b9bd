"""A process that is one of two ranks on one GPU; spawned, so it stands in a module of its own."""

import torch

from dspark.kernels.collective import host_file, host_start
from dspark.kernels.collective.host_layout import Layout
from dspark.kernels.collective.host_sum import host_sum_of
from dspark.kernels.collective.reference import ordered_sum

PAIR = Layout(2, 4096)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.int16), b.cpu().view(torch.int16))


def sum_and_lose(name: str, rank: int, barrier, other_is_gone, results) -> None:
    """90 sums, of which the wrong ones are counted, then one without the other rank.

    The card runs the two processes by turns.
    """
    device = torch.device("cuda")
    torch.zeros(1, device=device)
    mapped = host_file.attach(name, PAIR, rank)
    barrier.wait()  # both have allocated their pages
    host_start.register(mapped, device)
    end = host_sum_of(mapped, PAIR, rank, device)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(2, rows, PAIR.columns, generator=generator).bfloat16() for rows in (1, 6, 48)
    ]
    end.wait_at_most(0)  # load the kernels while nobody waits
    for partials in inputs:
        end(partials[rank].to(device))
    torch.cuda.synchronize()
    end.wait_at_most(10)
    barrier.wait()
    wrong = 0
    for number in range(90):
        partials = inputs[number % 3]
        wrong += not same_bits(end(partials[rank].to(device)), ordered_sum(partials))
    results.put((rank, wrong))
    other_is_gone.wait()
    end.wait_at_most(0.5)
    lost = end(inputs[1][rank].to(device))
    results.put((bool(lost.isnan().all()), end.views.fault[rank].tolist()))
