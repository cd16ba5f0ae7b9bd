"""Calibration that follows the text being served: how much better or worse drafts do than promised.

Confidences are corrected by what happened lately to drafts of the same kind of request (greedy or
sampled), the same position and about the same confidence. Only the verify schedule sees corrected
ones, so no output changes. What was seen is forgotten exponentially: where nothing is verified for
a while, the confidences are believed again and drafts get another chance.

R requests, C = CLASSES * BINS cells a position.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

CLASSES = ("greedy", "sampled")
BINS = 8  # equal ranges of confidence
BELIEF = 8.0  # drafts whose outcomes weigh as much as the confidence itself
HALF_LIFE = 512  # verify steps of a request of the class
DECAY = 0.5 ** (1 / HALF_LIFE)


class Seen(NamedTuple):
    """Drafts that the target has judged, discounted by their age; f32 [gamma, C] each."""

    tested: Tensor
    surplus: Tensor  # accepted drafts minus the sum of their confidences


def nothing_seen(gamma: int, device: torch.device | str) -> Seen:
    cells = len(CLASSES) * BINS
    return Seen(*(torch.zeros(gamma, cells, device=device) for _ in Seen._fields))


def corrected(seen: Seen, confidence: Tensor, sampled: Tensor) -> Tensor:
    """f32 [R, gamma] in [0, 1]: each confidence plus the mean surplus of its cell.

    Args:
        confidence: f32 [R, gamma]; NaN counts as 0 and values clamp to [0, 1].
        sampled: bool [R], False = greedy.
    """
    clean = _clean(confidence)
    mean = seen.surplus / (seen.tested + BELIEF)
    return (clean + mean.gather(1, _cell(clean, sampled).T).T).clamp(0.0, 1.0)


def aged(seen: Seen, sampled: Tensor) -> Seen:
    """What is left of it after a step of these requests. sampled: bool [R], False = greedy."""
    cells = torch.arange(seen.tested.shape[1], device=sampled.device)
    steps = torch.where(cells < BINS, (~sampled).sum(), sampled.sum())
    kept = DECAY**steps
    return Seen(seen.tested * kept, seen.surplus * kept)


def updated(seen: Seen, confidence: Tensor, sampled: Tensor, right: Tensor, rows: Tensor) -> Seen:
    """What has been seen after one more step.

    A draft was judged if its row ran and every draft before it was right. Sums run over the
    requests in their order, so that all ranks of a server see the same.

    Args:
        confidence, sampled: of the drafts, as in `corrected`, before the correction.
        right: int [R] drafts that the target agreed with.
        rows: int [R] rows that ran, the one of the last emitted token included.
    """
    clean = _clean(confidence)
    position = torch.arange(clean.shape[1], device=clean.device)
    judged = position < torch.minimum(right + 1, rows - 1)[:, None]
    surplus = (position < right[:, None]).float() - clean
    cells = torch.arange(seen.tested.shape[1], device=clean.device)
    # [R, gamma, C], one cell of each judged draft
    hit = ((_cell(clean, sampled)[..., None] == cells) & judged[..., None]).float()
    before = aged(seen, sampled)
    return Seen(before.tested + hit.sum(0), before.surplus + (hit * surplus[..., None]).sum(0))


def _clean(confidence: Tensor) -> Tensor:
    return confidence.nan_to_num(nan=0.0).clamp(0.0, 1.0)


def _cell(clean: Tensor, sampled: Tensor) -> Tensor:
    """i64 [R, gamma] cell of each draft."""
    return (clean * BINS).long().clamp(max=BINS - 1) + BINS * sampled.long()[:, None]


class OnlineCalibration:
    """`Seen` of a server; steps change it in their order, and nothing waits for the device."""

    def __init__(self, gamma: int, device: torch.device | str):
        self._seen = nothing_seen(gamma, device)
        self._forget = False

    def forget(self) -> None:
        """From the next step on. The step in flight may still be writing."""
        self._forget = True

    def corrected(self, confidence: Tensor, sampled: Tensor) -> Tensor:
        if self._forget:
            self._seen, self._forget = (
                nothing_seen(len(self._seen.tested), confidence.device),
                False,
            )
        return corrected(self._seen, confidence, sampled)

    def learn(self, confidence: Tensor, sampled: Tensor, right: Tensor, rows: Tensor) -> None:
        self._seen = updated(self._seen, confidence, sampled, right, rows)

    def age(self, sampled: Tensor) -> None:
        """A step of these requests drafted nothing."""
        self._seen = aged(self._seen, sampled)

    def report(self) -> dict[str, Any]:
        """By class and position: drafts tested lately, and their mean surplus."""
        tested, surplus = (
            each.cpu().unflatten(1, (len(CLASSES), BINS)).sum(2) for each in self._seen
        )
        error = (surplus / tested.clamp(min=1e-6)).where(tested > 0, torch.zeros(()))
        return {
            name: {
                "tested": [round(n, 1) for n in tested[:, i].tolist()],
                "surplus": [round(n, 4) for n in error[:, i].tolist()],
            }
            for i, name in enumerate(CLASSES)
        }
