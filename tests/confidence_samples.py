"""Confidence logits of blocks whose acceptance is known by construction."""

import torch


def overconfident(blocks=4000, temperature=2.5):
    """Blocks whose true acceptance chance is sigmoid(z / temperature)."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(blocks, 5, generator=generator) * 2 + 2
    happens = torch.rand(blocks, 5, generator=generator) < torch.sigmoid(z / temperature)
    return z, happens.int().cumprod(1).sum(1)
