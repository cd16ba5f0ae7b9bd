"""Configurations of the test and benchmark checkpoints, as `config.json` dictionaries.

The tiny ones keep every width that fixes a byte layout (head 512/64, index head 128, window 128)
and shrink the rest until a whole test suite fits two CPU cores. The mini ones keep the true
per-layer shapes of DeepSeek-V4-Flash and shrink depth, vocabulary or tensor-parallel share.
"""

from collections.abc import Callable
from typing import Any

Config = dict[str, Any]


def flash() -> Config:
    """DeepSeek-V4-Flash with its three DSpark stages."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": 129280,
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0, 0, 0],
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "sliding_window": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048,
        "num_hash_layers": 3,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "max_position_embeddings": 1048576,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [40, 41, 42],
        "dspark_markov_rank": 256,
    }


def tiny() -> Config:
    """9.5 M parameters; all three layer kinds, hash and scored routing, three draft stages."""
    config = _with_layers(flash(), [0, 4, 128, 4, 128], stages=3, hash_layers=2, vocab=512)
    return config | {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "q_lora_rank": 128,
        "o_lora_rank": 64,
        "o_groups": 2,
        "index_n_heads": 16,  # enough that relu rarely zeroes all of them
        "index_topk": 16,  # bites from position 64 on
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "dspark_markov_rank": 32,
        "max_position_embeddings": 4096,
        # A short original context puts the YaRN ramp where a short test can see it.
        "rope_scaling": flash()["rope_scaling"] | {"original_max_position_embeddings": 256},
    }


def tiny_tp2() -> Config:
    """Like `tiny`, but every dimension split over two ranks stays a multiple of 128."""
    config = _with_layers(tiny(), [0, 4, 128, 4], stages=2, hash_layers=2, vocab=512)
    return config | {"o_lora_rank": 128, "moe_intermediate_size": 256, "n_routed_experts": 4}


def tiny_tp4() -> Config:
    """The same for four ranks."""
    return tiny_tp2() | {"o_groups": 4, "moe_intermediate_size": 512}


def mini_flash() -> Config:
    """True layer shapes of one GPU-resident model: 5 layers and 3 stages, 32 experts."""
    config = _with_layers(flash(), [0, 4, 128, 4, 128], stages=3, hash_layers=1, vocab=16384)
    return config | {"n_routed_experts": 32}


def mini_flash_small() -> Config:
    """`mini_flash` with 4 layers and one draft stage."""
    config = _with_layers(flash(), [0, 4, 128, 4], stages=1, hash_layers=1, vocab=16384)
    # One stage, but three captured layers: main_proj keeps its true width.
    return config | {"n_routed_experts": 32, "dspark_target_layer_ids": [1, 2, 3]}


def mini_rank() -> Config:
    """What one of eight tensor-parallel ranks of `flash` holds, as a model of its own: 5 layers."""
    return _rank_share(_with_layers(flash(), [0, 4, 128, 4, 128], 3, hash_layers=1, vocab=16160))


def full_rank() -> Config:
    """`mini_rank` at the full depth of 43 layers and 3 stages."""
    return _rank_share(_with_layers(flash(), flash()["compress_ratios"][:43], 3, 3, vocab=16160))


PRESETS: dict[str, Callable[[], Config]] = {
    "tiny": tiny,
    "tiny-tp2": tiny_tp2,
    "tiny-tp4": tiny_tp4,
    "mini-flash": mini_flash,
    "mini-flash-small": mini_flash_small,
    "mini-rank": mini_rank,
    "full-rank": full_rank,
}


def _rank_share(config: Config) -> Config:
    return config | {"num_attention_heads": 8, "o_groups": 1, "moe_intermediate_size": 256}


def _with_layers(
    config: Config, ratios: list[int], stages: int, hash_layers: int, vocab: int
) -> Config:
    layers = len(ratios)
    return config | {
        "num_hidden_layers": layers,
        "compress_ratios": ratios + [0] * stages,
        "num_hash_layers": hash_layers,
        "vocab_size": vocab,
        "dspark_noise_token_id": vocab - 1,
        "dspark_target_layer_ids": list(range(layers - stages, layers)),
    }
