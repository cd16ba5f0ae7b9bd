"""Results of the draft ops."""

from typing import NamedTuple

from torch import Tensor


class MarkovBlock(NamedTuple):
    tokens: Tensor  # i64 [R, gamma] proposals d_1..d_gamma
    # f32 [R, gamma, shard] corrected logits, q = softmax(logits / temperature); None = not wanted
    logits: Tensor | None


class Confidence(NamedTuple):
    probability: Tensor  # f32 [R, gamma] calibrated chance that the draft is accepted
    logit: Tensor  # f32 [R, gamma] raw, before the temperature: what calibration is fitted on
