"""Bookkeeping of a load: every expected tensor exactly once, with its dtype and shape."""

from collections.abc import Iterable
from typing import NamedTuple

from dspark.target.checkpoint.names import TORCH_DTYPE, Table
from dspark.target.checkpoint.reader import CheckpointError, Stored


class LoadReport(NamedTuple):
    tensors: int
    nbytes: int


class Ledger:
    """Compares the tensors of a load with the expected table."""

    def __init__(self, table: Table):
        self._table = table
        self._seen: set[str] = set()
        self._nbytes = 0

    def expect(self, names: Iterable[str]) -> None:
        """Compare names alone: refuses a checkpoint in seconds, before any data is read.

        Raises:
            CheckpointError: naming the first tensor that is missing or does not belong.
        """
        present = set(names)
        for name in sorted(present):
            self._require_known(name)
        self._require_all(present)

    def enter(self, stored: Stored) -> None:
        """Check one tensor off.

        Raises:
            CheckpointError: it is not expected, already seen, or of another dtype or shape.
        """
        name, found = stored.name, stored.spec
        self._require_known(name)
        spec = self._table[name]
        if name in self._seen:
            raise CheckpointError(f"Tensor {name} occurs twice in the checkpoint.")
        if found.dtype != spec.dtype:
            raise CheckpointError(
                f"Tensor {name} must be {TORCH_DTYPE[spec.dtype]}, "
                f"the checkpoint has {TORCH_DTYPE.get(found.dtype, found.dtype)}."
            )
        if found.shape != spec.shape:
            raise CheckpointError(
                f"Tensor {name} must have shape {list(spec.shape)}, "
                f"the checkpoint has {list(found.shape)}."
            )
        self._seen.add(name)
        self._nbytes += spec.nbytes

    def close(self) -> LoadReport:
        """Raise CheckpointError naming the first expected tensor that never came."""
        self._require_all(self._seen)
        return LoadReport(len(self._seen), self._nbytes)

    def _require_known(self, name: str) -> None:
        if name not in self._table:
            raise CheckpointError(f"Tensor {name} does not belong to this model.")

    def _require_all(self, names: set[str]) -> None:
        missing = [name for name in self._table if name not in names]
        if missing:
            more = f" ({len(missing)} tensors are missing)" if len(missing) > 1 else ""
            raise CheckpointError(f"The checkpoint has no tensor {missing[0]}{more}.")
