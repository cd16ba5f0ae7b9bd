"""HF transformers' DeepSeek-V4 in fp32, built from one of our checkpoints: the target's oracle.

HF knows nothing of DSpark, so `mtp.*` is left out. Two differences to keep in mind:

* its indexer uses `topk`, which breaks ties arbitrarily where ours takes the lowest entry;
* it keeps no KV cache unless it is handed a `DynamicCache` built from the config.
"""

import json
import re
from pathlib import Path

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from dspark.kernels.common.fp8 import decode_e8m0
from dspark.kernels.linear import dequantise_fp8
from dspark.kernels.moe import dequantise_mxfp4
from dspark.target.checkpoint.names import DRAFT_PREFIX
from dspark.target.checkpoint.reader import Checkpoint

# Ours -> HF, applied in turn to a name without `.weight`.
RENAMES = (
    (r"^embed$", "model.embed_tokens"),
    (r"^head$", "lm_head"),
    (r"^norm$", "model.norm"),
    (r"^hc_head_(\w+)$", r"model.hc_head.hc_\1"),
    (r"^layers\.", "model.layers."),
    (r"\.attn_norm$", ".input_layernorm"),
    (r"\.ffn_norm$", ".post_attention_layernorm"),
    (r"\.hc_(attn|ffn)_(\w+)$", r".\1_hc.\2"),
    (r"\.attn\.indexer\.compressor\.", ".attn.indexer."),
    (r"\.attn\.indexer\.", ".attn.compressor.indexer."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.wq_a$", ".q_a_proj"),
    (r"\.wq_b$", ".q_b_proj"),
    (r"\.q_norm$", ".q_a_norm"),
    (r"\.wo_a$", ".o_a_proj"),
    (r"\.wo_b$", ".o_b_proj"),
    (r"\.wkv$", ".kv_proj"),
    (r"\.wgate$", ".gate_proj"),
    (r"\.attn_sink$", ".sinks"),
    (r"\.ape$", ".position_bias"),
    (r"(compressor|indexer)\.norm$", r"\1.kv_norm"),
    (r"\.indexer\.weights_proj$", ".indexer.scorer.weights_proj"),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.w1$", ".gate_proj"),
    (r"\.w2$", ".down_proj"),
    (r"\.w3$", ".up_proj"),
)
BARE_PARAMETERS = re.compile(
    r"(attn_hc|ffn_hc|hc_head)\.\w+|sinks|position_bias|tid2eid|e_score_correction_bias"
)


def load_oracle(directory: str | Path) -> DeepseekV4ForCausalLM:
    """The HF model with every target weight of the checkpoint, dequantised to fp32."""
    fields = json.loads((Path(directory) / "config.json").read_text())
    fields.pop("quantization_config")  # the weights below are dequantised already
    fields.pop("torch_dtype")
    config = DeepseekV4Config(**fields)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = DeepseekV4ForCausalLM(config).float().eval()
    model.load_state_dict(hf_state_dict(dequantised(directory)), strict=True)
    return model


@torch.no_grad()
def oracle_prefill(
    model: DeepseekV4ForCausalLM, tokens: list[int]
) -> tuple[torch.Tensor, DynamicCache]:
    """Logits f32 [T, vocab] of a prompt, and the cache to decode on."""
    cache = DynamicCache(config=model.config)
    out = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    return out.logits[0], cache


@torch.no_grad()
def oracle_decode(model: DeepseekV4ForCausalLM, token: int, cache: DynamicCache) -> torch.Tensor:
    """Logits f32 [vocab] after one more token; `cache` grows by it."""
    out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
    return out.logits[0, 0]


def dequantised(directory: str | Path) -> dict[str, torch.Tensor]:
    """Target tensors in fp32 (tid2eid stays i64) under checkpoint names, scales multiplied in."""
    raw = dict(Checkpoint(directory).tensors(lambda name: not name.startswith(DRAFT_PREFIX)))
    out = {}
    for name, tensor in raw.items():
        if name.endswith(".scale"):
            continue
        if tensor.dtype == torch.int8:
            scale = raw[name.removesuffix("weight") + "scale"].view(torch.uint8)
            tensor = dequantise_mxfp4(tensor.view(torch.uint8), scale).float()
        elif tensor.dtype == torch.float8_e4m3fn:
            scale = raw[name.removesuffix("weight") + "scale"]
            tensor = dequantise_fp8(tensor, decode_e8m0(scale)).float()
        out[name] = tensor if tensor.dtype == torch.int64 else tensor.float()
    return out


def hf_state_dict(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Checkpoint names to HF names; routed experts are stacked, w1 above w3."""
    out: dict[str, torch.Tensor] = {}
    experts: dict[int, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in weights.items():
        match = re.fullmatch(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.(w[123])\.weight", name)
        if match:
            experts.setdefault(int(match[1]), {})[int(match[2]), match[3]] = tensor
            continue
        out[hf_name(name)] = tensor
    for layer, matrices in experts.items():
        prefix = f"model.layers.{layer}.mlp.experts."
        ids = range(len(matrices) // 3)
        out[prefix + "gate_up_proj"] = torch.stack(
            [torch.cat((matrices[e, "w1"], matrices[e, "w3"])) for e in ids]
        )
        out[prefix + "down_proj"] = torch.stack([matrices[e, "w2"] for e in ids])
    return out


def hf_name(name: str) -> str:
    """HF name of a checkpoint tensor outside the routed experts."""
    new = name.removesuffix(".weight")
    for pattern, replacement in RENAMES:
        new = re.sub(pattern, replacement, new)
    return new if BARE_PARAMETERS.search(new) else f"{new}.weight"
