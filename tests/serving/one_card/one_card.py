"""A second plugin for SGLang: all ranks of a server on the first card of this machine.

NCCL refuses two ranks on a card. Here their groups are gloo's, and what travels between ranks goes
through the host; the sums of up to 64 rows go through the memory that they share, as on a machine
of many cards. Correctness only: the ranks take turns on the card.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

from torch import Tensor


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from dspark.kernels.collective import transport

    def hook(place: str, replacement: Callable, kind: HookType) -> None:
        HookRegistry.register(f"sglang.srt.{place}", replacement, kind)

    hook("entrypoints.engine.maybe_reindex_device_id", the_first_card, HookType.REPLACE)
    hook("distributed.bootstrap.get_default_distributed_backend", gloo, HookType.REPLACE)
    hook("distributed.parallel_state.init_model_parallel_group", without_nccl, HookType.AROUND)
    transport.gather = through_host(transport.gather)
    transport.exchange = through_host(transport.exchange)


@contextlib.contextmanager
def the_first_card(gpu_id: int) -> Iterator[int]:
    yield 0


def gloo(device: str) -> str:
    return "gloo"


def without_nccl(original: Callable, *args, **kwargs):
    return original(*args, **kwargs | {"use_pynccl": False})


def through_host(send: Callable) -> Callable:
    """`transport.gather` or `exchange` for tensors of a card."""

    @functools.wraps(send)
    def sent(x: Tensor, group, purpose: str) -> Tensor:
        return send(x.cpu(), group, purpose).to(x.device)

    return sent
