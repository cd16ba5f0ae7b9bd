"""What the draft ops take and return."""

from typing import NamedTuple

from torch import Tensor


class DraftSampling(NamedTuple):
    """How the drafts of R requests are drawn."""

    temperature: Tensor  # f32 [R]; 0 = greedy
    seeded: Tensor  # bool [R] the request itself named the seed
    seed: Tensor  # i64 [R]
    committed: Tensor  # i64 [R] position of the last emitted token


class MarkovBlock(NamedTuple):
    tokens: Tensor  # i64 [R, gamma] proposals d_1..d_gamma
    # f32 [R, gamma, shard] corrected logits, q = softmax(logits / temperature); None = not wanted
    logits: Tensor | None


class Confidence(NamedTuple):
    probability: Tensor  # f32 [R, gamma] calibrated chance that the draft is accepted
    logit: Tensor  # f32 [R, gamma] raw, before the temperature: what calibration is fitted on
