"""Launch configurations: how each kernel is launched, fixed at build time.

Every family's `kernel.py` holds a `LAUNCH: dict[str, LaunchConfig]` (what the wrapper launches)
and an `AOT: list[AotEntry]` (what `python -m dspark.kernels.aot` compiles for sm_89). There is no
autotuner: timing noise must never choose the order of a sum.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class LaunchConfig(NamedTuple):
    """Compile-time choices of one kernel."""

    num_warps: int
    num_stages: int
    constexprs: Mapping[str, int]  # block sizes and other tl.constexpr arguments


class AotEntry(NamedTuple):
    """One specialisation of a kernel that must compile for sm_89 without a GPU."""

    name: str  # unique, "family.kernel[shape class]"
    fn: Any  # the @triton.jit function
    signature: Mapping[str, str]  # run-time argument -> Triton type: "*bf16", "*fp8e4nv", "i32"
    constexprs: Mapping[str, Any]  # tl.constexpr argument -> value
    divisible: tuple[str, ...]  # run-time arguments declared multiples of 16 (pointers, strides)
    num_warps: int
    num_stages: int
    expects_mma: bool  # the PTX must contain mma.sync
    hot: bool  # no register may spill
