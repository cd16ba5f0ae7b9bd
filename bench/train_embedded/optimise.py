"""Muon for the matrices inside blocks, AdamW for everything else, one shared schedule.

Muon moves a matrix along the orthogonalised momentum of its gradient (Newton-Schulz iteration),
scaled to the root mean square of a typical Adam step so that both share one learning rate scale.
Matrices of equal shape are orthogonalised in one batch.
"""

from typing import Any

import torch

from dspark.bench.train_embedded.parameters import storage, trained

Weights = dict[str, torch.Tensor]
MOMENTUM = 0.95
WEIGHT_DECAY = 0.1
MUON_RATE = 3e-3
ADAM_RATES = {
    "embed.weight": 8e-3,
    "head.weight": 4e-3,
    "markov_w1.weight": 4e-3,
    "markov_w2.weight": 4e-3,
}
ADAM_DEFAULT = 2e-3
ADAM_RMS = 0.2  # usual root mean square of an Adam step at rate 1
WARMUP, DECAY_FROM = 0.02, 0.4  # fractions of the run
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def schedule(progress: float) -> float:
    """Factor on all learning rates at a fraction 0..1 of the run: warm up, hold, fall to 0."""
    if progress < WARMUP:
        return max(progress / WARMUP, 0.02)
    return min(1.0, max(0.0, (1 - progress) / (1 - DECAY_FROM)))


class Optimiser:
    """Steps the trained tensors of `weights` in place."""

    def __init__(self, weights: Weights):
        self._matrices = {n: w for n, w in weights.items() if trained(n) and _is_matrix(n, w)}
        self._momentum = {n: torch.zeros_like(w) for n, w in self._matrices.items()}
        others = {n: w for n, w in weights.items() if trained(n) and n not in self._matrices}
        groups = [
            {"params": [w], "lr": _adam_rate(n), "rate": _adam_rate(n)} for n, w in others.items()
        ]
        self._others = list(others.values())
        fused = self._others[0].is_cuda
        self._adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One step at `factor` times the base rates; clears the gradients."""
        torch.nn.utils.clip_grad_norm_(self._others, 1.0)
        for group in self._adam.param_groups:
            group["lr"] = group["rate"] * factor
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        by_shape: dict[torch.Size, list[str]] = {}
        for name, weight in self._matrices.items():
            if weight.grad is not None:
                by_shape.setdefault(_as_matrices(name, weight).shape[1:], []).append(name)
        for names in by_shape.values():
            self._step_matrices(names, MUON_RATE * factor)

    def _step_matrices(self, names: list[str], rate: float) -> None:
        updates = []
        for name in names:
            gradient, momentum = self._matrices[name].grad, self._momentum[name]
            assert gradient is not None
            momentum.lerp_(gradient, 1 - MOMENTUM)
            updates.append(_as_matrices(name, gradient.lerp(momentum, MOMENTUM)))
        counts = [len(u) for u in updates]
        batch = orthogonalise(torch.cat(updates))
        scale = ADAM_RMS * max(batch.shape[-2:]) ** 0.5
        for name, update in zip(names, batch.split(counts), strict=True):
            weight = self._matrices[name]
            weight.mul_(1 - rate * WEIGHT_DECAY)
            weight.add_(update.reshape(weight.shape), alpha=-rate * scale)
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self._momentum, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, momentum in state["momentum"].items():
            self._momentum[name].copy_(momentum)
        self._adam.load_state_dict(state["adam"])


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """[B, N, K] to nearly semi-orthogonal matrices with the same singular vectors."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def _is_matrix(name: str, weight: torch.Tensor) -> bool:
    inside = name.startswith(("layers.", "mtp.")) and weight.ndim >= 2
    compressor = ".compressor.w" in name
    return inside and (storage(name) in ("fp8", "mxfp4") or compressor)


def _as_matrices(name: str, weight: torch.Tensor) -> torch.Tensor:
    """[B, N, K]; the gate and up matrices of an expert count separately."""
    if name.endswith("experts.w13"):
        count, rows, columns = weight.shape
        return weight.view(2 * count, rows // 2, columns)
    return weight if weight.ndim == 3 else weight[None]


def _adam_rate(name: str) -> float:
    return next((r for suffix, r in ADAM_RATES.items() if name.endswith(suffix)), ADAM_DEFAULT)
