"""What the layers of one target forward share, besides weights."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dspark.kernels.step import StepMeta
from dspark.target.caches import LayerCaches
from dspark.target.config import ModelConfig
from dspark.target.rope import rope_table_on


class RopeTables(NamedTuple):
    """Ratio-0 layers rotate by plain theta 1e4; compressed layers by theta 1.6e5 with YaRN."""

    plain: torch.Tensor  # [maxpos, 64] f32
    compressed: torch.Tensor  # [maxpos, 64] f32

    def of(self, ratio: int) -> torch.Tensor:
        return self.plain if ratio == 0 else self.compressed


class Forward(NamedTuple):
    """Rows, tables and memory of one forward; made once, read by every layer."""

    meta: StepMeta
    # Rows of running requests (decode, verify), each request's few enough for
    # `dspark.kernels.compress.rows_fit_ring`; False = rows of prompts.
    running: bool
    rope: RopeTables
    caches: Sequence[LayerCaches]  # one per layer, updated in place


def rope_tables(config: ModelConfig, max_positions: int, device: torch.device) -> RopeTables:
    return RopeTables(
        rope_table_on(device, config.rope_theta, max_positions, None),
        rope_table_on(device, config.compress_rope_theta, max_positions, config.yarn),
    )
