"""The expected tensor table: published totals, and telling sibling checkpoints apart."""

import math

import pytest

from dspark.target.checkpoint import presets
from dspark.target.checkpoint.names import (
    TensorSpec,
    check_draft,
    checkpoint_tensors,
    draft_tensors,
    target_tensors,
    total_bytes,
)
from dspark.target.config import ConfigError, ModelConfig

FLASH = ModelConfig.from_hf(presets.flash())


def parameters(table):
    """Weights, two to a byte in MXFP4; scales and the hash table are not parameters."""
    return sum(
        math.prod(spec.shape) * (2 if spec.dtype == "I8" else 1)
        for spec in table.values()
        if spec.dtype not in ("F8_E8M0", "I64")
    )


def test_flash_has_the_published_number_of_tensors_bytes_and_parameters():
    table = checkpoint_tensors(FLASH)
    assert len(table) == 72_317
    assert total_bytes(table) == 166_878_536_440
    assert round(parameters(target_tensors(FLASH)) / 1e9, 2) == 284.33
    assert round(parameters(draft_tensors(FLASH)) / 1e9, 2) == 19.85


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("embed.weight", ("BF16", (129280, 4096))),
        ("hc_head_fn", ("F32", (4, 16384))),
        ("layers.0.hc_attn_fn", ("F32", (24, 16384))),
        ("layers.0.attn.wq_b.scale", ("F8_E8M0", (256, 8))),
        ("layers.7.attn.wo_a.weight", ("F8_E4M3", (8192, 4096))),
        ("layers.2.ffn.gate.tid2eid", ("I64", (129280, 6))),
        ("layers.3.ffn.gate.bias", ("F32", (256,))),
        ("layers.2.attn.compressor.wkv.weight", ("BF16", (1024, 4096))),
        ("layers.3.attn.compressor.ape", ("F32", (128, 512))),
        ("layers.2.attn.indexer.compressor.ape", ("F32", (4, 256))),
        ("layers.42.ffn.experts.255.w2.weight", ("I8", (4096, 1024))),
        ("layers.42.ffn.experts.255.w1.scale", ("F8_E8M0", (2048, 128))),
        ("mtp.0.main_proj.scale", ("F8_E8M0", (32, 96))),
        ("mtp.2.markov_head.markov_w2.weight", ("BF16", (129280, 256))),
        ("mtp.2.confidence_head.proj.weight", ("BF16", (1, 4352))),
    ],
)
def test_names_shapes_and_types_of_the_release(name, spec):
    assert checkpoint_tensors(FLASH)[name] == TensorSpec(*spec)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attn.compressor.ape",  # window only
        "layers.3.attn.indexer.wq_b.weight",  # C128 has no indexer
        "layers.2.ffn.gate.bias",  # hash layers are not biased
        "layers.3.ffn.gate.tid2eid",
        "mtp.0.ffn.gate.tid2eid",
        "mtp.1.main_proj.weight",
        "mtp.1.norm.weight",
        "mtp.0.embed.weight",  # shared with the target
    ],
)
def test_names_that_only_other_layers_have(name):
    assert name not in checkpoint_tensors(FLASH)


@pytest.mark.parametrize(
    ("preset", "million_parameters", "gib"),
    [
        ("tiny", 9.49, 0.0095),
        ("tiny-tp2", 8.53, 0.0085),
        ("tiny-tp4", 11.68, 0.0104),
        ("mini-flash", 7747, 4.6),
        ("mini-flash-small", 4927, 3.0),
        ("mini-rank", 6871, 3.8),
        ("full-rank", 38820, 20.6),
    ],
)
def test_sizes_of_the_presets(preset, million_parameters, gib):
    table = checkpoint_tensors(ModelConfig.from_hf(presets.PRESETS[preset]()))
    assert parameters(table) / 1e6 == pytest.approx(million_parameters, rel=1e-3)
    assert total_bytes(table) / 2**30 == pytest.approx(gib, rel=0.02)


def test_siblings_are_told_apart():
    dspark_names = checkpoint_tensors(FLASH)
    check_draft(FLASH, dspark_names)

    base_config = {k: v for k, v in presets.flash().items() if not k.startswith("dspark_")}
    with pytest.raises(
        ConfigError, match=r"no DSpark draft: config\.json has no field dspark_block"
    ):
        check_draft(ModelConfig.from_hf(base_config), dspark_names)
    with pytest.raises(ConfigError, match=r"no DSpark draft: it holds no mtp\.\* tensor"):
        check_draft(FLASH, target_tensors(FLASH))
    with pytest.raises(ConfigError, match="plain MTP block, not DSpark"):
        check_draft(FLASH, ["mtp.0.enorm.weight", "mtp.0.e_proj.weight", "mtp.0.attn_norm.weight"])
    one_stage = [name for name in dspark_names if not name.startswith(("mtp.1.", "mtp.2."))]
    with pytest.raises(ConfigError, match=r"holds 1 draft stages .* asks for 3"):
        check_draft(FLASH, one_stage)
