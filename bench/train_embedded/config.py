"""The two configurations that the recipe trains, as `config.json` dictionaries."""

from dspark.target.checkpoint.presets import Config, flash
from dspark.target.config import DSparkConfig, ModelConfig


def embedded() -> Config:
    """12.8 M parameters, 13.7 MB: every layer kind, hash and scored routing, three draft stages.

    The files must stay under 14 MB, so widths that the format stores in 2 or 4 bytes (vocabulary,
    compressor projections, hyper-connections) are small and the 4-bit experts are wide.
    """
    ratios = [0, 4, 128, 4, 0, 0]
    return flash() | {
        "vocab_size": 2048,
        "hidden_size": 192,
        "num_hidden_layers": len(ratios),
        "compress_ratios": [*ratios, 0, 0, 0],
        "num_attention_heads": 2,
        "q_lora_rank": 128,
        "o_lora_rank": 64,
        "o_groups": 2,
        "index_n_heads": 4,
        "index_topk": 64,  # bites from position 256 on
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "num_hash_layers": 1,
        "max_position_embeddings": 4096,
        "dspark_noise_token_id": 2047,
        "dspark_target_layer_ids": [3, 4, 5],
        "dspark_markov_rank": 64,
    }


def tiny() -> Config:
    """A few steps of every phase take seconds on one CPU core; too small to learn anything."""
    return embedded() | {
        "vocab_size": 384,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "compress_ratios": [0, 4, 128, 0, 0, 0],
        "q_lora_rank": 32,
        "o_lora_rank": 32,
        "index_topk": 16,
        "moe_intermediate_size": 32,
        "dspark_noise_token_id": 383,
        "dspark_target_layer_ids": [2, 3],
        "dspark_markov_rank": 16,
    }


def dspark_of(config: ModelConfig) -> DSparkConfig:
    assert config.dspark is not None, "the recipe trains DSpark checkpoints only"
    return config.dspark
