"""From the draft block's logits to draft tokens, and how far to trust each of them."""

from torch import Tensor

from dspark.kernels.common.dispatch import op
from dspark.kernels.draft import reference
from dspark.kernels.draft.types import Confidence, MarkovBlock

__all__ = ["Confidence", "MarkovBlock", "confidence", "markov_block"]


def _can_sample(
    temperature: Tensor | None,
    seeded: Tensor | None,
    seed: Tensor | None,
    committed: Tensor | None,
) -> None:
    if temperature is not None and (seeded is None or seed is None or committed is None):
        raise ValueError("sampling drafts needs seeded, seed and committed")


markov_block = op(reference.markov_block, check=_can_sample)
confidence = op(reference.confidence)
