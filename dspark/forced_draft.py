"""Drafts of a chosen quality in place of the model's, for tests and measurements.

`DSPARK_FORCED_DRAFT` names the kind: `oracle` (the target's own continuation, so every draft is
accepted), `wrong` (never what the target says next), `wrong@k` (k right ones, then wrong ones) or
`random`. All but `random` read the target's greedy continuations from the JSON file that
`DSPARK_ORACLE` names: `[{"prompt": [ids], "output": [ids]}, ...]`. The verify path is untouched.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dspark.errors import UsageError
from dspark.kernels import rng

KIND = "DSPARK_FORCED_DRAFT"
ORACLE = "DSPARK_ORACLE"
Continuations = Mapping[tuple[int, ...], list[int]]


class ForcedDraft:
    """Proposals by request slot. S slots, `length` the longest output remembered."""

    def __init__(
        self,
        kind: str,
        continuations: Continuations,
        slots: int,
        length: int,
        vocab: int,
        device: torch.device | str,
    ):
        if not re.fullmatch(r"oracle|random|wrong(@\d+)?", kind):
            raise UsageError(f"{KIND}={kind} is none of oracle, wrong, wrong@k and random.")
        self.kind, self.vocab, self.continuations = kind, vocab, continuations
        self.right = int(kind.partition("@")[2] or 0)
        self.table = torch.zeros(slots, length, dtype=torch.int64, device=device)
        self.prompt_len = torch.zeros(slots, dtype=torch.int64, device=device)

    def admit(self, slots: Sequence[int], reqs: Sequence[Any]) -> None:
        """Look the requests' continuations up."""
        for slot, req in zip(slots, reqs, strict=True):
            prompt = list(req.origin_input_ids)
            self.prompt_len[slot] = len(prompt)
            known = self.continuations.get(tuple(prompt), [])[: self.table.shape[1]]
            self.table[slot] = 0
            self.table[slot, : len(known)] = torch.tensor(known, device=self.table.device)

    def propose(self, slot: torch.Tensor, prefix: torch.Tensor, depth: int) -> torch.Tensor:
        """i64 [R, depth] drafts for positions prefix+1, prefix+2, ... slot, prefix: i64 [R]."""
        k = torch.arange(depth, device=slot.device)
        position = prefix[:, None] + 1 + k
        if self.kind == "random":
            name = rng.stream(slot[:, None], position, rng.DRAFT)
            return rng.bits(name) % self.vocab
        place = (position - self.prompt_len[slot][:, None]).clamp(0, self.table.shape[1] - 1)
        truth = self.table[slot[:, None], place]
        if self.kind == "oracle":
            return truth
        return torch.where(k < self.right, truth, (truth + 1) % self.vocab)


def from_environment(
    slots: int, length: int, vocab: int, device: torch.device | str
) -> ForcedDraft | None:
    """The seam, or None where `DSPARK_FORCED_DRAFT` is not set.

    Raises:
        UsageError: an unknown kind, or no file of continuations where one is needed.
    """
    kind = os.environ.get(KIND)
    if not kind:
        return None
    continuations: dict[tuple[int, ...], list[int]] = {}
    if kind != "random":
        file = os.environ.get(ORACLE)
        if not file:
            raise UsageError(f"{KIND}={kind} needs the target's continuations: set {ORACLE}.")
        try:
            records = json.loads(Path(file).read_text())
            continuations = {tuple(r["prompt"]): list(r["output"]) for r in records}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{ORACLE}={file} cannot be read: {error!r}.") from None
    return ForcedDraft(kind, continuations, slots, length, vocab, device)
