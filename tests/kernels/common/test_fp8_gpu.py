"""e4m3 conversion on a GPU, where sm_89 code would round twice if Triton had its way."""

import pytest
import torch
from kv_cases import assert_rounds_once, fp8_borders

pytestmark = pytest.mark.gpu


def test_borders_between_codes_round_once(device):
    assert_rounds_once(fp8_borders().to(device))


def test_any_bit_pattern_rounds_once(device):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (10_000_000,), generator=generator).int()
    assert_rounds_once(bits.view(torch.float32).to(device))
    near_codes = torch.randn(10_000_000, generator=generator) * 100
    assert_rounds_once(near_codes.to(device))
