"""From the draft block's logits to draft tokens, and how far to trust each of them."""

from dspark.kernels.common.dispatch import op
from dspark.kernels.draft import reference
from dspark.kernels.draft.types import Confidence, DraftSampling, MarkovBlock

__all__ = ["Confidence", "DraftSampling", "MarkovBlock", "confidence", "markov_block"]


markov_block = op(reference.markov_block)
confidence = op(reference.confidence)
