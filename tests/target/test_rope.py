"""RoPE tables against HF's, against closed forms, and the YaRN ramp of the published config."""

import math

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from dspark.target.checkpoint import presets
from dspark.target.config import ModelConfig, YarnConfig
from dspark.target.rope import rope_frequencies, rope_table, yarn_range

FLASH = ModelConfig.from_hf(presets.flash())
TINY = ModelConfig.from_hf(presets.tiny())


def test_plain_table_holds_cosines_then_sines():
    table = rope_table(10000.0, 300, None)
    assert table.shape == (300, 64)
    assert table.dtype == torch.float32
    for t, i in [(0, 5), (1, 0), (299, 31), (123, 7)]:
        angle = t * 10000.0 ** (-2 * i / 64)
        assert table[t, i].item() == pytest.approx(math.cos(angle), abs=2e-5)
        assert table[t, 32 + i].item() == pytest.approx(math.sin(angle), abs=2e-5)


def test_yarn_ramp_of_flash_and_tiny():
    assert yarn_range(FLASH.compress_rope_theta, FLASH.yarn) == (15, 25)
    assert yarn_range(TINY.compress_rope_theta, TINY.yarn) == (0, 10)


def test_yarn_keeps_fast_pairs_and_slows_slow_ones_by_the_factor():
    plain = rope_frequencies(160000.0, None)
    yarn = rope_frequencies(160000.0, FLASH.yarn)
    assert yarn[:16].equal(plain[:16])
    torch.testing.assert_close(yarn[25:], plain[25:] / 16)
    half = 20  # middle of the ramp 15..25
    assert yarn[half].item() == pytest.approx(plain[half].item() * (0.5 / 16 + 0.5), rel=1e-6)


@pytest.mark.parametrize("preset", [presets.flash, presets.tiny])
@pytest.mark.parametrize("kind", ["main", "compress"])
def test_tables_match_hf(preset, kind):
    fields = {k: v for k, v in preset().items() if k not in ("torch_dtype", "quantization_config")}
    hf = DeepseekV4RotaryEmbedding(DeepseekV4Config(**fields))
    positions = torch.arange(2000)
    cos, sin = hf(torch.zeros(1), positions[None], layer_type=kind)
    config = ModelConfig.from_hf(preset())
    theta, yarn = (
        (config.rope_theta, None) if kind == "main" else (config.compress_rope_theta, config.yarn)
    )
    table = rope_table(theta, 2000, yarn)
    # Both sides round a frequency once; the angle multiplies that by the position.
    torch.testing.assert_close(table, torch.cat((cos[0], sin[0]), 1), rtol=0, atol=2000 * 2e-7)
    torch.testing.assert_close(table[:600], torch.cat((cos[0], sin[0]), 1)[:600], rtol=0, atol=5e-5)


def test_a_ramp_without_width_does_not_divide_by_zero():
    yarn = YarnConfig(4.0, 1.0, 1.0, 6)  # an original context too short for a single turn
    assert yarn_range(160000.0, yarn) == (0, 0.001)
    frequencies = rope_frequencies(160000.0, yarn)
    assert torch.isfinite(frequencies).all()
    torch.testing.assert_close(frequencies[1:], rope_frequencies(160000.0, None)[1:] / 4)
