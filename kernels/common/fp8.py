"""Numbers of eight bits: e4m3 values and E8M0 scales, with plain torch."""

from functools import lru_cache

import torch
from torch import Tensor

FP8_MAX = 448.0  # largest e4m3
AMAX_FLOOR = 1e-4  # what a group's largest value counts as at least, so that no scale is 0


def decode_e8m0(codes: Tensor) -> Tensor:
    """E8M0 bytes to f32 powers of two; byte 0 is 0.0, byte 255 is inf (refused when loading)."""
    return (codes.view(torch.uint8).to(torch.int32) << 23).view(torch.float32)


def decode_e4m3(codes: Tensor) -> Tensor:
    """f32 values of uint8 e4m3 bytes. On CPU a flat table look-up is 6x faster than the cast."""
    values = torch.index_select(_e4m3_values(codes.device), 0, codes.reshape(-1).int())
    return values.view(codes.shape)


@lru_cache(maxsize=8)
def _e4m3_values(device: torch.device) -> Tensor:
    """f32 [256]: value of each e4m3 byte."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    return codes.view(torch.float8_e4m3fn).float()
