"""Bookkeeping of a load: every expected tensor exactly once, with its dtype and shape."""

from typing import NamedTuple

import torch

from dspark.target.checkpoint.formats import E8M0_NAN
from dspark.target.checkpoint.names import TORCH_DTYPE, Table
from dspark.target.checkpoint.reader import CheckpointError


class LoadReport(NamedTuple):
    tensors: int
    nbytes: int


class Ledger:
    """Compares the tensors of a load with the expected table."""

    def __init__(self, table: Table):
        self._table = table
        self._seen: set[str] = set()
        self._nbytes = 0

    def enter(self, name: str, tensor: torch.Tensor) -> None:
        """Check one tensor off.

        Raises:
            CheckpointError: it is not expected, already seen, of another dtype or shape, or an
                E8M0 scale contains NaN (byte 255).
        """
        spec = self._table.get(name)
        if spec is None:
            raise CheckpointError(f"Tensor {name} does not belong to this model.")
        if name in self._seen:
            raise CheckpointError(f"Tensor {name} occurs twice in the checkpoint.")
        if tensor.dtype != TORCH_DTYPE[spec.dtype]:
            raise CheckpointError(
                f"Tensor {name} must be {TORCH_DTYPE[spec.dtype]}, the checkpoint has {tensor.dtype}."
            )
        if tuple(tensor.shape) != spec.shape:
            raise CheckpointError(
                f"Tensor {name} must have shape {list(spec.shape)}, "
                f"the checkpoint has {list(tensor.shape)}."
            )
        if spec.dtype == "F8_E8M0" and (tensor.view(torch.uint8) == E8M0_NAN).any():
            raise CheckpointError(f"Tensor {name} contains scale byte 255, which is NaN.")
        self._seen.add(name)
        self._nbytes += spec.nbytes

    def close(self) -> LoadReport:
        """Raise CheckpointError naming the first expected tensor that never came."""
        missing = [name for name in self._table if name not in self._seen]
        if missing:
            more = f" ({len(missing)} tensors are missing)" if len(missing) > 1 else ""
            raise CheckpointError(f"The checkpoint has no tensor {missing[0]}{more}.")
        return LoadReport(len(self._seen), self._nbytes)
