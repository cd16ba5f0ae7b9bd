"""Rotary position tables.

DeepSeek-V4 rotates the last 64 dims of a head in interleaved pairs (2i, 2i+1). Ratio-0 layers and
the draft use plain theta 1e4; compressed layers use theta 1.6e5 with YaRN for everything in the
layer. There is no attention factor. Frequencies and angles are computed in fp32 on purpose: the
model was trained with fp32 angles, so more precision would be less faithful.
"""

import functools
import math
from typing import NamedTuple

import torch

from dspark.target.config import ModelConfig, YarnConfig

ROPE_DIM = 64


class RopeTables(NamedTuple):
    """Ratio-0 layers rotate by plain theta 1e4; compressed layers by theta 1.6e5 with YaRN."""

    plain: torch.Tensor  # [maxpos, 64] f32
    compressed: torch.Tensor  # [maxpos, 64] f32

    def of(self, ratio: int) -> torch.Tensor:
        return self.plain if ratio == 0 else self.compressed


def rope_tables(config: ModelConfig, max_positions: int, device: torch.device) -> RopeTables:
    return RopeTables(
        rope_table_on(device, config.rope_theta, max_positions, None),
        rope_table_on(device, config.compress_rope_theta, max_positions, config.yarn),
    )


def rope_table(theta: float, max_positions: int, yarn: YarnConfig | None) -> torch.Tensor:
    """Cosines and sines of every position.

    Args:
        theta: base, `rope_theta` or `compress_rope_theta`.
        max_positions: rows of the table.
        yarn: `rope_scaling` for compressed layers, None for plain RoPE.

    Returns:
        f32 [max_positions, 64]: columns 0..31 are cos(f_i * t), columns 32..63 sin(f_i * t).
    """
    angles = torch.outer(
        torch.arange(max_positions, dtype=torch.float32), rope_frequencies(theta, yarn)
    )
    return torch.cat((angles.cos(), angles.sin()), dim=1)


@functools.lru_cache(maxsize=2)
def rope_table_on(
    device: torch.device, theta: float, max_positions: int, yarn: YarnConfig | None
) -> torch.Tensor:
    """`rope_table` on a device: one tensor for all who ask for the same, target and draft."""
    return rope_table(theta, max_positions, yarn).to(device)


def rope_frequencies(theta: float, yarn: YarnConfig | None) -> torch.Tensor:
    """f32 [32] angle per position of each pair; YaRN slows the low frequencies by its factor."""
    exponents = torch.arange(0, ROPE_DIM, 2, dtype=torch.float32) / ROPE_DIM
    frequencies = 1.0 / theta**exponents
    if yarn is None:
        return frequencies
    low, high = yarn_range(theta, yarn)
    pairs = torch.arange(ROPE_DIM // 2, dtype=torch.float32)
    interpolated = ((pairs - low) / (high - low)).clamp(0, 1)
    return frequencies / yarn.factor * interpolated + frequencies * (1 - interpolated)


def yarn_range(theta: float, yarn: YarnConfig) -> tuple[float, float]:
    """Pairs below the first bound keep their frequency, pairs above the second are slowed."""

    def pair_of(rotations: float) -> float:
        """Pair that turns `rotations` times over the original context."""
        turns = yarn.original_max_position_embeddings / (2 * math.pi * rotations)
        return ROPE_DIM * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), ROPE_DIM - 1)
    return low, high if high > low else low + 0.001  # a ramp of width zero would divide by zero
