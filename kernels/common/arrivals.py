"""Split sums in one launch: the last program to arrive adds the partials in ascending order.

Which program is last varies from run to run; the order in which it adds does not, so the result
is deterministic. Only the arrival count is atomic, never a float.
"""

import functools

import torch
import triton
import triton.language as tl

CAPACITY = 1 << 16  # counters per device


@functools.cache
def arrival_counters(device: torch.device) -> torch.Tensor:
    """Zeroed i32 counters of a device; every launch leaves them zero again.

    Launches that share them must be ordered, so ops of one process run on one stream. The first
    call allocates: make it outside CUDA graph capture (preparing any linear weight does).
    """
    return torch.zeros(CAPACITY, dtype=torch.int32, device=device)


@triton.jit
def last_to_arrive(counter, expected):
    """True in the last of `expected` programs; it then sees every partial stored before.

    Read the partials with cache_modifier=".cg": an L1 line could predate another program's store.
    """
    tl.debug_barrier()  # the whole program has stored its partial before one thread counts it
    last = tl.atomic_add(counter, 1, sem="acq_rel") == expected - 1
    if last:
        tl.store(counter, 0)
    return last
