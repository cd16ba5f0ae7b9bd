"""Configuration: strict reading, one-sentence refusals, and the siblings of the 0731 release."""

import json

import pytest
from transformers import DeepseekV3Config

from dspark.target.checkpoint import presets
from dspark.target.config import ConfigError, ModelConfig, YarnConfig


def changed(**fields):
    """TINY's config.json with some fields replaced; None removes one."""
    config = presets.tiny() | fields
    return {name: value for name, value in config.items() if value is not None}


def test_flash_reads_as_published():
    config = ModelConfig.from_hf(presets.flash())
    assert len(config.compress_ratios) == config.num_hidden_layers == 43
    assert [config.compress_ratios.count(r) for r in (0, 4, 128)] == [2, 21, 20]
    assert config.compress_ratios[:3] == (0, 0, 4)
    assert config.compress_ratios[-1] == 4
    assert config.yarn == YarnConfig(16.0, 32.0, 1.0, 65536)
    assert config.dspark.stages == 3
    assert config.dspark.block_size == 5
    assert [config.is_hash_layer(i) for i in (0, 2, 3)] == [True, True, False]


NEEDED = sorted(
    set(presets.tiny())
    - {"architectures", "torch_dtype", "num_nextn_predict_layers", "dspark_block_size"}
)


@pytest.mark.parametrize("field", NEEDED)
def test_each_missing_field_is_named(field):
    with pytest.raises(ConfigError, match=rf"no field {field}\.$"):
        ModelConfig.from_hf(changed(**{field: None}))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model_type": "deepseek_v3"}, "model_type must be 'deepseek_v4', got 'deepseek_v3'"),
        ({"hidden_size": "4096"}, "hidden_size must be a positive integer, got '4096'"),
        ({"hidden_size": 100}, "hidden_size must be a multiple of 32, got 100"),
        ({"head_dim": 128}, "head_dim must be 512, as the kernels need, got 128"),
        ({"sliding_window": 4096}, "sliding_window must be 128"),
        ({"hc_mult": 2}, "hc_mult must be 4"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer, got True"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, got 0"),
        ({"scoring_func": "softmax"}, "scoring_func must be 'sqrtsoftplus'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False, got True"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be True, got 1"),
        ({"expert_dtype": "fp8"}, "expert_dtype must be 'fp4', got 'fp8'"),
        ({"n_shared_experts": 2}, "n_shared_experts must be 1"),
        ({"compress_ratios": [0, 4]}, "compress_ratios has 2 entries for 5 layers"),
        ({"compress_ratios": [0, 4, 128, 4, 64]}, "entry 4 is 64, a layer allows (0, 4, 128)"),
        ({"compress_ratios": [0, 4, 128, 4, 0, 4]}, "entry 5 is 4, a draft stage allows (0,)"),
        ({"compress_ratios": 4}, "compress_ratios must be a list of integers, got 4"),
        ({"o_groups": 3}, "o_groups 3 does not divide num_attention_heads 4"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds n_routed_experts 8"),
        ({"num_hash_layers": 6}, "num_hash_layers 6 exceeds num_hidden_layers 5"),
        ({"eos_token_id": [3, 512]}, "eos_token_id 512 is outside the vocabulary of 512"),
        ({"eos_token_id": []}, "eos_token_id must be a token id or a list of token ids, got []"),
        ({"eos_token_id": [1, -1]}, "eos_token_id must be a token id or a list of token ids"),
        ({"eos_token_id": [True]}, "eos_token_id must be a token id or a list of token ids"),
        ({"eos_token_id": 512}, "eos_token_id 512 is outside the vocabulary of 512"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.type must be 'yarn', got 'linear'"),
        ({"rope_scaling": {"type": "yarn"}}, "no field rope_scaling.factor"),
        ({"rope_scaling": 16}, "rope_scaling must be an object, got 16"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method"),
        ({"dspark_noise_token_id": 512}, "dspark_noise_token_id 512 is outside the vocabulary"),
        ({"dspark_target_layer_ids": [3, 2]}, "dspark_target_layer_ids must ascend within 0..4"),
        ({"dspark_target_layer_ids": [3, 5]}, "dspark_target_layer_ids must ascend within 0..4"),
        ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids must ascend within 0..4"),
        ({"dspark_block_size": 0}, "dspark_block_size must be a positive integer, got 0"),
    ],
)
def test_each_odd_value_is_one_sentence(fields, sentence):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_hf(changed(**fields))
    message = str(error.value)
    assert sentence in message
    assert message.endswith(".")
    assert "\n" not in message


def test_dspark_is_told_by_its_block_size_and_not_by_the_mtp_count():
    base = {k: v for k, v in presets.flash().items() if not k.startswith("dspark_")}
    base["compress_ratios"] = base["compress_ratios"][:44]  # 43 layers and one plain MTP block
    assert ModelConfig.from_hf(base).dspark is None
    assert ModelConfig.from_hf(presets.flash() | {"num_nextn_predict_layers": 0}).dspark


def test_stage_count_prefers_the_index_then_ratios_then_captured_layers(tmp_path):
    config = presets.tiny()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelConfig.from_checkpoint(tmp_path).dspark.stages == 3  # three extra ratios
    index = {
        "weight_map": {f"mtp.{i}.attn_norm.weight": "x" for i in (0, 1)} | {"head.weight": "x"}
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ModelConfig.from_checkpoint(tmp_path).dspark.stages == 2
    without = config | {"compress_ratios": config["compress_ratios"][:5]}
    without["dspark_target_layer_ids"] = [1, 2, 3, 4]
    assert ModelConfig.from_hf(without).dspark.stages == 4


def test_sglang_s_v3_config_object_reads_the_same(tmp_path):
    """SGLang parses V4 with the V3 class, which moves rope_theta and adds V3 defaults."""

    class V4Alias(DeepseekV3Config):
        model_type = "deepseek_v4"

    (tmp_path / "config.json").write_text(json.dumps(presets.tiny()))
    parsed = V4Alias.from_pretrained(tmp_path)
    assert ModelConfig.from_hf(parsed) == ModelConfig.from_hf(presets.tiny())


def test_only_the_file_itself_shows_that_a_field_is_absent(tmp_path):
    """Why `from_checkpoint` exists: the V3 class would silently use 7168 here."""
    (tmp_path / "config.json").write_text(json.dumps(changed(hidden_size=None)))
    with pytest.raises(ConfigError, match=r"no field hidden_size\.$"):
        ModelConfig.from_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, r"Cannot read .*config\.json: No such file or directory\.$"),
        ("{", r"config\.json is not valid JSON: "),
        ("[]", r"config\.json does not hold a JSON object\.$"),
    ],
)
def test_unreadable_config_file(tmp_path, content, sentence):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        ModelConfig.from_checkpoint(tmp_path)


def test_one_end_token_or_several():
    assert ModelConfig.from_hf(changed(eos_token_id=7)).eos_token_ids == (7,)
    assert ModelConfig.from_hf(changed(eos_token_id=[279, 474])).eos_token_ids == (279, 474)
