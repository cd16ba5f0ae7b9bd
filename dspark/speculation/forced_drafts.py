"""Drafts of a chosen quality in place of the model's, request by request: for tests.

With `DSPARK_FORCED_DRAFTS=1` a request may carry, in `sampling_params.custom_params`,
`{"draft": kind, "continuation": [ids]}`, and `"only_rank": r` to have its drafts forced on one
tensor-parallel rank, as a faulty card would. Kinds: `oracle` proposes the continuation, so that a
target which says the same accepts everything; `wrong` always proposes something else; `wrong@k`
is right k times a block, then wrong; `random` needs no continuation; `none` drafts nothing while
all requests of its batch ask for that, and is the model's own otherwise. The verify path does not
know where drafts come from.
"""

import os
import re
from collections.abc import Sequence
from typing import Any

import torch

from dspark.errors import UsageError
from dspark.kernels.common import rng

VARIABLE = "DSPARK_FORCED_DRAFTS"
RANDOM = -2
MODEL = -1  # the request's drafts are the model's own
NONE = "none"


def right_drafts(kind: str, depth: int) -> int:
    """How many drafts of a block follow the continuation; RANDOM for none at all, MODEL for `none`.

    Raises:
        UsageError: unknown kind.
    """
    if kind == NONE:
        return MODEL
    match = re.fullmatch(r"(oracle|random|wrong)(?:@(\d+))?", kind)
    if match is None or (match[2] and match[1] != "wrong"):
        raise UsageError(f"A forced draft is oracle, wrong, wrong@k, random or none, not {kind!r}.")
    if match[1] == "random":
        return RANDOM
    return depth if match[1] == "oracle" else min(int(match[2] or 0), depth)


def wish_of(req: Any) -> dict[str, Any]:
    return req.sampling_params.custom_params or {}


def nobody_drafts(reqs: Sequence[Any]) -> bool:
    """Whether all requests of a batch ask for no draft."""
    return all(wish_of(req).get("draft") == NONE for req in reqs)


class ForcedDrafts:
    """Forced proposals by request slot. S slots, M the longest continuation."""

    def __init__(
        self, slots: int, longest: int, depth: int, vocab: int, device: str, rank: int = 0
    ):
        self.depth, self.vocab, self.rank = depth, vocab, rank
        self.continuation = torch.zeros(slots, longest, dtype=torch.int64, device=device)
        self.prompt_len = torch.zeros(slots, dtype=torch.int64, device=device)
        self.right = torch.full((slots,), MODEL, dtype=torch.int64, device=device)

    def admit(self, slots: Sequence[int], reqs: Sequence[Any]) -> None:
        """Read what each request asks for."""
        for slot, req in zip(slots, reqs, strict=True):
            wish = wish_of(req)
            kind = wish.get("draft") if wish.get("only_rank", self.rank) == self.rank else None
            self.right[slot] = MODEL if kind is None else right_drafts(kind, self.depth)
            self.prompt_len[slot] = len(req.origin_input_ids)
            known = wish.get("continuation", [])[: self.continuation.shape[1]]
            self.continuation[slot] = 0
            self.continuation[slot, : len(known)] = torch.tensor(known, dtype=torch.int64)

    def replace(
        self, tokens: torch.Tensor, slot: torch.Tensor, committed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's drafts with the forced requests' put in.

        Args:
            tokens: i64 [R, depth].
            slot, committed: i64 [R]; draft k is for position committed + 1 + k.

        Returns:
            Tokens, and bool [R]: whose were put in, and so were certain.
        """
        k = torch.arange(self.depth, device=tokens.device)
        position = committed[:, None] + 1 + k
        place = (position - self.prompt_len[slot][:, None]).clamp(0, self.continuation.shape[1] - 1)
        truth = self.continuation[slot[:, None], place]
        right = self.right[slot][:, None]
        chosen = torch.where(k < right, truth, (truth + 1) % self.vocab)
        noise = rng.bits(rng.stream(slot[:, None], position, rng.DRAFT)) % self.vocab
        chosen = torch.where(right == RANDOM, noise, chosen)
        chosen = torch.where(right == MODEL, tokens, chosen)
        return chosen, right[:, 0] != MODEL


def from_environment(
    slots: int, longest: int, depth: int, vocab: int, device: str, rank: int
) -> ForcedDrafts | None:
    if os.environ.get(VARIABLE) != "1":
        return None
    return ForcedDrafts(slots, longest, depth, vocab, device, rank)
