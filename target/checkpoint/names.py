"""Every tensor of a checkpoint: name, dtype and shape, derived from the configuration.

Names are those of the official release. `layers.{i}.` is the target, `mtp.{i}.` the draft; the
draft shares nothing but `embed` and `head`, which live with the target.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from dspark.target.config import ConfigError, DSparkConfig, ModelConfig

TORCH_DTYPE = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I8": torch.int8,
    "I64": torch.int64,
}
DRAFT_PREFIX = "mtp."
# Only the multi-token-prediction block of the base model has these; a DSpark stage never does.
PLAIN_MTP_TENSORS = ("mtp.0.e_proj.weight", "mtp.0.h_proj.weight", "mtp.0.enorm.weight")


class TensorSpec(NamedTuple):
    dtype: str  # safetensors spelling, a key of TORCH_DTYPE
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * TORCH_DTYPE[self.dtype].itemsize


Table = dict[str, TensorSpec]


def target_tensors(config: ModelConfig) -> Table:
    """Expected target tensors, in layer order."""
    table = {
        "embed.weight": TensorSpec("BF16", (config.vocab_size, config.hidden_size)),
        "head.weight": TensorSpec("BF16", (config.vocab_size, config.hidden_size)),
    }
    table |= _final_tensors("", config)
    for layer, ratio in enumerate(config.compress_ratios):
        table |= _block(f"layers.{layer}.", config, ratio, hashed=config.is_hash_layer(layer))
    return table


def draft_tensors(config: ModelConfig) -> Table:
    """Expected DSpark tensors, in stage order.

    Raises:
        ConfigError: the checkpoint has no DSpark draft.
    """
    dspark = require_dspark(config)
    hidden = config.hidden_size
    table: Table = {}
    for stage in range(dspark.stages):
        table |= _block(f"mtp.{stage}.", config, ratio=0, hashed=False)
    table |= _fp8("mtp.0.main_proj", hidden, len(dspark.target_layer_ids) * hidden)
    table["mtp.0.main_norm.weight"] = TensorSpec("BF16", (hidden,))
    last = f"mtp.{dspark.stages - 1}."
    table |= _final_tensors(last, config)
    for side in ("markov_w1", "markov_w2"):
        table[f"{last}markov_head.{side}.weight"] = TensorSpec(
            "BF16", (config.vocab_size, dspark.markov_rank)
        )
    table[f"{last}confidence_head.proj.weight"] = TensorSpec(
        "BF16", (1, hidden + dspark.markov_rank)
    )
    return table


def checkpoint_tensors(config: ModelConfig) -> Table:
    """Target tensors, and draft tensors where the configuration has a DSpark draft."""
    table = target_tensors(config)
    return table | draft_tensors(config) if config.dspark else table


def total_bytes(table: Table) -> int:
    return sum(spec.nbytes for spec in table.values())


def require_dspark(config: ModelConfig) -> DSparkConfig:
    """The draft's configuration; ConfigError where there is none."""
    if config.dspark is None:
        raise ConfigError(
            "This checkpoint has no DSpark draft: config.json has no field dspark_block_size."
        )
    return config.dspark


def check_draft(config: ModelConfig, names: Iterable[str]) -> None:
    """Raise ConfigError unless `names`, all tensors of the checkpoint, hold the DSpark draft.

    Cheap (no tensor is read): lets a server refuse a checkpoint before it loads anything.
    """
    dspark = require_dspark(config)
    drafts = {name for name in names if name.startswith(DRAFT_PREFIX)}
    stages = len({name.split(".")[1] for name in drafts})
    if not drafts:
        raise ConfigError("This checkpoint has no DSpark draft: it holds no mtp.* tensor.")
    if any(name in drafts for name in PLAIN_MTP_TENSORS):
        raise ConfigError("This checkpoint's mtp.* tensors are a plain MTP block, not DSpark.")
    if stages != dspark.stages:
        raise ConfigError(
            f"The checkpoint holds {stages} draft stages (mtp.*), "
            f"its configuration asks for {dspark.stages}."
        )


def _block(prefix: str, config: ModelConfig, ratio: int, hashed: bool) -> Table:
    hidden = config.hidden_size
    table: Table = {}
    for site in ("attn", "ffn"):
        table[f"{prefix}{site}_norm.weight"] = TensorSpec("BF16", (hidden,))
        table |= _hyper(f"{prefix}hc_{site}", config, outputs=24, scales=3)
    table |= _attention(f"{prefix}attn.", config)
    if ratio:
        table |= _compressor(f"{prefix}attn.compressor.", config, ratio, config.head_dim)
    if ratio == 4:
        table |= _indexer(f"{prefix}attn.indexer.", config)
    return table | _experts(f"{prefix}ffn.", config, hashed)


def _attention(prefix: str, config: ModelConfig) -> Table:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.q_lora_rank
    grouped = config.o_groups * config.o_lora_rank
    return (
        _fp8(f"{prefix}wq_a", latent, hidden)
        | _fp8(f"{prefix}wq_b", heads * config.head_dim, latent)
        | _fp8(f"{prefix}wkv", config.head_dim, hidden)
        | _fp8(f"{prefix}wo_a", grouped, heads * config.head_dim // config.o_groups)
        | _fp8(f"{prefix}wo_b", hidden, grouped)
        | {
            f"{prefix}q_norm.weight": TensorSpec("BF16", (latent,)),
            f"{prefix}kv_norm.weight": TensorSpec("BF16", (config.head_dim,)),
            f"{prefix}attn_sink": TensorSpec("F32", (heads,)),
        }
    )


def _compressor(prefix: str, config: ModelConfig, ratio: int, width: int) -> Table:
    rows = 2 * width if ratio == 4 else width  # C4 windows overlap: two halves per token
    return {
        f"{prefix}wkv.weight": TensorSpec("BF16", (rows, config.hidden_size)),
        f"{prefix}wgate.weight": TensorSpec("BF16", (rows, config.hidden_size)),
        f"{prefix}ape": TensorSpec("F32", (ratio, rows)),
        f"{prefix}norm.weight": TensorSpec("BF16", (width,)),
    }


def _indexer(prefix: str, config: ModelConfig) -> Table:
    heads, width = config.index_n_heads, config.index_head_dim
    return (
        _fp8(f"{prefix}wq_b", heads * width, config.q_lora_rank)
        | {f"{prefix}weights_proj.weight": TensorSpec("BF16", (heads, config.hidden_size))}
        | _compressor(f"{prefix}compressor.", config, 4, width)
    )


def _experts(prefix: str, config: ModelConfig, hashed: bool) -> Table:
    hidden, width, count = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    table = {f"{prefix}gate.weight": TensorSpec("BF16", (count, hidden))}
    if hashed:
        table[f"{prefix}gate.tid2eid"] = TensorSpec(
            "I64", (config.vocab_size, config.num_experts_per_tok)
        )
    else:
        table[f"{prefix}gate.bias"] = TensorSpec("F32", (count,))
    matrices = {"w1": (width, hidden), "w2": (hidden, width), "w3": (width, hidden)}
    for expert in range(count):
        for name, (rows, columns) in matrices.items():
            table |= _mxfp4(f"{prefix}experts.{expert}.{name}", rows, columns)
    for name, (rows, columns) in matrices.items():
        table |= _fp8(f"{prefix}shared_experts.{name}", rows, columns)
    return table


def _final_tensors(prefix: str, config: ModelConfig) -> Table:
    return {f"{prefix}norm.weight": TensorSpec("BF16", (config.hidden_size,))} | _hyper(
        f"{prefix}hc_head", config, outputs=4, scales=1
    )


def _hyper(prefix: str, config: ModelConfig, outputs: int, scales: int) -> Table:
    return {
        f"{prefix}_fn": TensorSpec("F32", (outputs, config.hc_mult * config.hidden_size)),
        f"{prefix}_base": TensorSpec("F32", (outputs,)),
        f"{prefix}_scale": TensorSpec("F32", (scales,)),
    }


def _fp8(prefix: str, rows: int, columns: int) -> Table:
    return {
        f"{prefix}.weight": TensorSpec("F8_E4M3", (rows, columns)),
        f"{prefix}.scale": TensorSpec("F8_E8M0", (-(-rows // 128), -(-columns // 128))),
    }


def _mxfp4(prefix: str, rows: int, columns: int) -> Table:
    return {
        f"{prefix}.weight": TensorSpec("I8", (rows, columns // 2)),
        f"{prefix}.scale": TensorSpec("F8_E8M0", (rows, columns // 32)),
    }
