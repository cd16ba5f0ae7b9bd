"""What must compile for sm_89, found by calling the wrappers themselves.

A family's `examples.py` lists calls of its wrappers on tensors without memory (device "meta"). The
launches are intercepted, so an entry has the very types, constants, divisibility and options that
a GPU would be given. Lengths that vary while serving are chosen odd and above 1 in the examples:
Triton would make a multiple of 16, or a 1, part of the binary.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from dspark.kernels.common.launch_table import FAMILIES

ADA = 89


def target(capability: int = ADA) -> GPUTarget:
    return GPUTarget("cuda", capability, 32)


class Example(NamedTuple):
    """A call of a wrapper, and which kernel to take of those it launches."""

    name: str  # "kernel[shape class]", unique in its family
    kernel: JITFunction
    call: Callable[[], object]
    launch: int = 0  # which of its launches
    mma: bool = False  # the PTX must contain mma.sync
    hot: bool = True  # no register may spill


class Launch(NamedTuple):
    """One intercepted launch."""

    kernel: JITFunction
    signature: Mapping[str, str]  # run-time argument -> Triton type: "*bf16", "*fp8e4nv", "i32"
    constexprs: Mapping[str, Any]  # tl.constexpr argument, or an absent one -> value
    divisible: tuple[str, ...]  # run-time arguments known to be multiples of 16
    num_warps: int
    num_stages: int


class AotEntry(NamedTuple):
    """One specialisation of a kernel that must compile for sm_89 without a GPU."""

    name: str  # unique, "family.kernel[shape class]"
    fn: Any  # the @triton.jit function
    signature: Mapping[str, str]  # as in Launch, like the next four
    constexprs: Mapping[str, Any]
    divisible: tuple[str, ...]
    num_warps: int
    num_stages: int
    expects_mma: bool
    hot: bool


def meta(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor without memory, for an example call."""
    return torch.empty(shape, dtype=dtype, device="meta")


def launches_of(call: Callable[[], object]) -> list[Launch]:
    """What `call` would launch on an sm_89 device, in order; nothing is launched."""
    launches: list[Launch] = []
    original = JITFunction.run

    def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(_launch(self, args, kwargs))

    JITFunction.run = note
    try:
        call()
    finally:
        JITFunction.run = original
    return launches


def aot_entries(family: str | None = None) -> list[AotEntry]:
    """Every specialisation that must compile for sm_89, of one family or of all.

    Raises:
        ValueError: for a family without kernels, when two entries share a name, or when an example
            launches its kernel too few times.
    """
    if family is not None and family not in FAMILIES:
        raise ValueError(f"no kernels in {family!r}; families: {', '.join(FAMILIES)}")
    entries = [
        _entry(name, example)
        for name in (FAMILIES if family is None else (family,))
        for example in _examples(name)
    ]
    names = [entry.name for entry in entries]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(f"AOT entries share a name: {', '.join(duplicates)}")
    return entries


def _examples(family: str) -> list[Example]:
    return importlib.import_module(f"dspark.kernels.{family}.examples").EXAMPLES


def _entry(family: str, example: Example) -> AotEntry:
    launches = [one for one in launches_of(example.call) if one.kernel is example.kernel]
    name = f"{family}.{example.name}"
    if len(launches) <= example.launch:
        raise ValueError(f"the call of {name} launches its kernel {len(launches)} times")
    return AotEntry(name, *launches[example.launch], example.mma, example.hot)


def _launch(kernel: JITFunction, args: tuple, kwargs: dict) -> Launch:
    """As JITFunction.run sees its arguments."""
    backend = make_backend(target())
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialisation, _ = bind(*args, **kwargs)
    types = dict(zip(bound, specialisation, strict=True))
    options = backend.parse_options(kwargs)
    return Launch(
        kernel,
        {name: kind for name, (kind, _) in types.items() if kind != "constexpr"},
        {name: bound[name] for name, (kind, _) in types.items() if kind == "constexpr"},
        tuple(name for name, (kind, key) in types.items() if kind != "constexpr" and key == "D"),
        options.num_warps,
        options.num_stages,
    )
