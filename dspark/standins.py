"""Stand-ins for `sgl_kernel` and `torchvision` on a machine without a GPU.

SGLang imports both at module level all over, and neither has a wheel that works beside a CPU
build of torch. A stand-in lets the import succeed; whoever calls one of its functions gets a
NotImplementedError that names the function. The single function that serving on a CPU really
calls is implemented. A real package that is installed is never shadowed.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
import warnings

CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"  # SGLang's own switch; child processes inherit it
VERSIONS = {"sgl_kernel": "0.4.5", "torchvision": "0.0.0"}


class Missing:
    """A name of a package that is not here: can be imported and passed around, not called."""

    def __init__(self, name: str):
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self.__name__} does not exist on a machine without a GPU")

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


class StandinModule(types.ModuleType):
    """A module whose unknown names are `Missing`."""

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
) -> None:
    """Write consecutive runs of slots into the token table.

    Args:
        req_pool_indices: int [R] rows of the table.
        req_to_token: i32 [S, M], written at [row, start:end] for each request.
        start_offset, end_offset: int [R].
        out_cache_loc: int [sum of lengths], request after request.
        pool_len: M, unused.
    """
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


class StandinFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves the given top-level names and every submodule below them."""

    def __init__(self, names: frozenset[str]):
        self.names = names

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandinModule(spec.name)

    def exec_module(self, module) -> None:
        module.__version__ = VERSIONS[module.__name__.partition(".")[0]]
        if module.__name__ == "sgl_kernel":
            module.assign_req_to_token_pool_cpu = assign_req_to_token_pool_cpu


def absent(names=tuple(VERSIONS)) -> frozenset[str]:
    """Which of the packages are not installed."""
    return frozenset(n for n in names if n not in sys.modules and not importlib.util.find_spec(n))


def install_if_cpu() -> None:
    """Install the stand-ins that are needed, if this process serves on the CPU. Idempotent."""
    if os.environ.get(CPU_ENGINE) != "1":
        return
    names = absent()  # an installed stand-in counts as present
    if names:
        sys.meta_path.insert(0, StandinFinder(names))
        silence_consequences()


def silence_consequences() -> None:
    """Hide what SGLang says, in every process, about models and formats that need a GPU."""
    for start in ("Triton is not supported", "Only CUDA"):
        warnings.filterwarnings("ignore", message=start)
    logging.getLogger("sglang.srt.models.registry").addFilter(
        lambda record: "Ignore import error when loading sglang." not in record.getMessage()
    )
