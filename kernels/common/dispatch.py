"""One op, two implementations: Triton on CUDA tensors, the torch reference everywhere else.

A family has a torch function for each of its ops in `reference.py`: that is the specification,
with the signature, the docstring and the production code of a CPU. Its Triton twin is the function
of the same name and the same parameters in `kernel.py`. `op` makes one function of the two.
"""

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Triton decides when a kernel is decorated, so the process must be started with it set.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# A row must not depend on its batch, so one sum must be computed in one way wherever the row lies
# in a tile and whatever the tile's height. Two things in Triton would break that:
# - Contraction: of a * b + c * d either product may be fused into the addition, and the compiler
#   chooses differently in the copies of an unrolled loop.
# - wgmma: on Hopper high tiles would take it and low ones mma.sync, which round differently. Ada
#   has mma.sync only.
COMPILER_SETTINGS = {"TRITON_DEFAULT_FP_FUSION": "0", "DISABLE_MMA_V3": "1"}


@functools.cache
def settle_compiler() -> None:
    """Compile as COMPILER_SETTINGS say from now on, in this process.

    Not on import: SGLang imports the plugin for every model, and others keep their Triton.
    """
    os.environ.update(COMPILER_SETTINGS)


def use_triton(x: torch.Tensor) -> bool:
    """True when the Triton kernel should handle `x`: on CUDA, or anywhere under the interpreter.

    `DSPARK_KERNELS=reference` forces the reference on any device, which is how a kernel is
    suspected or cleared when an output looks wrong.
    """
    triton = (x.is_cuda or INTERPRETED) and os.environ.get("DSPARK_KERNELS") != "reference"
    if triton:
        settle_compiler()  # before the launch that would compile
    return triton


def op(
    reference: Callable[Parameters, Result],
    *,
    check: Callable[..., None] | None = None,
    reference_if: Callable[..., bool] | None = None,
) -> Callable[Parameters, Result]:
    """The op that `reference` specifies, with its signature and docstring.

    The first tensor of the first argument decides between the two implementations. The twin is
    imported on the first call that needs it: a CPU never loads a kernel.

    check: raises ValueError for arguments that do not fit. It runs before either implementation
        and takes those of the op's arguments that its parameters name.
    reference_if: takes arguments likewise; True sends the call to the reference on any device.
    """
    signature = inspect.signature(reference)
    family = reference.__module__.rpartition(".")[0]
    leading = _by_name(lambda argument: argument, signature, [next(iter(signature.parameters))])
    check_arguments = None if check is None else _by_name(check, signature)
    wants_reference = None if reference_if is None else _by_name(reference_if, signature)

    @functools.wraps(reference)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if check_arguments is not None:
            check_arguments(args, kwargs)
        oracle = wants_reference is not None and wants_reference(args, kwargs)
        if oracle or not use_triton(_first_tensor(leading(args, kwargs))):
            return reference(*args, **kwargs)
        twin = getattr(importlib.import_module(f"{family}.kernel"), reference.__name__)
        return twin(*args, **kwargs)

    return run


def _by_name(
    function: Callable[..., Any], signature: inspect.Signature, names: list[str] | None = None
) -> Callable[[tuple, dict], Any]:
    """`function` of those arguments of a call that its parameters (or `names`) name."""
    known = list(signature.parameters)
    wanted = [
        (known.index(name), name, signature.parameters[name].default)
        for name in names or inspect.signature(function).parameters
    ]

    def call(args: tuple, kwargs: dict) -> Any:
        values = []
        for place, name, default in wanted:
            if place >= len(args) and name not in kwargs and default is inspect.Parameter.empty:
                signature.bind(*args, **kwargs)  # raises the TypeError that names what is missing
            values.append(args[place] if place < len(args) else kwargs.get(name, default))
        return function(*values)

    return call


def _first_tensor(argument: Any) -> torch.Tensor:
    """The tensor itself, or the first of a NamedTuple or list of tensors."""
    return argument if isinstance(argument, torch.Tensor) else _first_tensor(argument[0])
