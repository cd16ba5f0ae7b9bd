"""Write trained masters as a checkpoint in the official format."""

import json
import shutil
from pathlib import Path

import torch

from dspark.bench.train_embedded.corpus import BOS, EOS
from dspark.bench.train_embedded.parameters import Weights
from dspark.target.checkpoint.formats import encode_fp8, encode_mxfp4
from dspark.target.checkpoint.names import TORCH_DTYPE, TensorSpec, checkpoint_tensors
from dspark.target.checkpoint.presets import Config
from dspark.target.checkpoint.writer import Written, write_checkpoint
from dspark.target.config import ModelConfig

SHARD_BYTES = 64 << 20


def export(directory: Path, config: Config, masters: Weights, tokenizer_file: Path) -> Written:
    """Write config, tokenizer, index and shards.

    Args:
        masters: f32 masters of target and draft, under the names of `parameters`.

    Raises:
        KeyError: a master is missing.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(tokenizer_file, directory / "tokenizer.json")
    _write_tokenizer_config(directory, config)
    split = split_experts(masters)
    table = checkpoint_tensors(ModelConfig.from_hf(config))
    return write_checkpoint(
        directory, table, lambda name, spec: encode(name, spec, split), SHARD_BYTES
    )


def split_experts(masters: Weights) -> Weights:
    """One tensor per expert and matrix, as the checkpoint names them."""
    split = {n: w.detach().cpu() for n, w in masters.items()}
    for name in [n for n in split if n.endswith("ffn.experts.w13")]:
        prefix = name.removesuffix("w13")
        w13, w2 = split.pop(name), split.pop(f"{prefix}w2")
        for expert in range(len(w2)):
            w1, w3 = w13[expert].chunk(2)
            split[f"{prefix}{expert}.w1.weight"] = w1.contiguous()
            split[f"{prefix}{expert}.w3.weight"] = w3.contiguous()
            split[f"{prefix}{expert}.w2.weight"] = w2[expert]
    return split


def encode(name: str, spec: TensorSpec, masters: Weights) -> torch.Tensor:
    """One tensor of the checkpoint: a code matrix, its scales, or a cast."""
    if spec.dtype == "F8_E8M0":
        weight = masters[name.removesuffix("scale") + "weight"]
        scales = (encode_mxfp4 if ".experts." in name else encode_fp8)(weight).scales
        return scales.view(torch.float8_e8m0fnu)
    weight = masters[name]
    if spec.dtype == "F8_E4M3":
        return encode_fp8(weight).codes
    if spec.dtype == "I8":
        return encode_mxfp4(weight).packed.view(torch.int8)
    return weight.to(TORCH_DTYPE[spec.dtype]).contiguous()


def _write_tokenizer_config(directory: Path, config: Config) -> None:
    contents = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
        "generation_config.json": {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": config["eos_token_id"],
        },
    }
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
