"""A trap for operators that make the host wait for the device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SYNCHRONISING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "equal",
    "is_nonzero",
)


class NoSync(TorchDispatchMode):
    """Raises where a value is copied to the host or a shape depends on values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[1].split(".")[0]
        if name.strip("_") in {n.strip("_") for n in SYNCHRONISING}:
            raise AssertionError(f"{function.name()} waits for the device")
        if name in ("index", "index_put", "index_put_") and any(
            t is not None and t.dtype == torch.bool for t in (args[1] if len(args) > 1 else ())
        ):
            raise AssertionError("a boolean mask as index has a shape that depends on values")
        return function(*args, **(kwargs or {}))
