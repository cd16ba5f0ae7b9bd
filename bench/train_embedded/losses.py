"""The draft's objective: cross-entropy, total variation and confidence, as in the DSpark recipe.

Weights and decay follow DeepSeek's released training code (DeepSpec): 0.1 cross-entropy,
0.9 L1 distance of the distributions, 1.0 confidence, rows weighted exp(-row / 4).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

CROSS_ENTROPY, TOTAL_VARIATION, CONFIDENCE = 0.1, 0.9, 1.0
ROW_DECAY = 4.0


class DraftLoss(NamedTuple):
    total: torch.Tensor
    cross_entropy: torch.Tensor
    distance: torch.Tensor  # mean L1 distance of draft and target distributions, 0..2
    confidence: torch.Tensor
    accept_rate: torch.Tensor  # f32 [rows] mean of sum(min(p, q)): acceptance at temperature 1
    agreement: torch.Tensor  # f32 [rows] how often the most likely tokens are equal


def draft_loss(
    logits: torch.Tensor,
    target_logits: torch.Tensor,
    labels: torch.Tensor,
    confidence: torch.Tensor,
) -> DraftLoss:
    """All inputs are of block rows [..., rows(, V)]; labels: i64 next tokens."""
    rows = logits.shape[-2]
    weight = torch.exp(-torch.arange(rows, device=logits.device) / ROW_DECAY)
    weight = weight / weight.sum()
    log_q = logits.log_softmax(-1)
    p = target_logits.softmax(-1)
    cross_entropy = -log_q.gather(-1, labels[..., None])[..., 0]
    distance = (log_q.exp() - p).abs().sum(-1)
    accept = (1 - distance / 2).detach()
    bce = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")

    def mean(values: torch.Tensor) -> torch.Tensor:
        return (values * weight).sum(-1).mean()

    parts = mean(cross_entropy), mean(distance), mean(bce)
    total = CROSS_ENTROPY * parts[0] + TOTAL_VARIATION * parts[1] + CONFIDENCE * parts[2]
    agreement = (logits.argmax(-1) == target_logits.argmax(-1)).float()
    return DraftLoss(total, *parts, accept.flatten(0, -2).mean(0), agreement.flatten(0, -2).mean(0))
