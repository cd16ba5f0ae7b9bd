"""HF's model fed with what the server's formats leave of activations and cache.

Rounds where serving does: inputs of FP8 linears (e4m3 per 128 columns), stored keys (e4m3 per 64
columns, bf16 rotary part), indexer queries and keys (Hadamard, e4m3). What stays different is
bf16 rounding between ops, which HF in fp32 does not do.
"""

import contextlib
from collections.abc import Iterator

import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from dspark.kernels.linear import act_quant

FP8_INPUT = ("q_a_proj", "q_b_proj", "o_b_proj", "kv_proj", "gate_proj", "up_proj", "down_proj")


def fp8_round_trip(x: torch.Tensor, group: int, pow2: bool) -> torch.Tensor:
    codes, scales = act_quant(x.reshape(-1, x.shape[-1]).bfloat16(), group=group, pow2=pow2)
    wide = scales.repeat_interleave(group, 1)[:, : x.shape[-1]]
    return (codes.float() * wide).view(x.shape).to(x.dtype)


def hadamard(n: int) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / n**0.5


def stored_key(x: torch.Tensor) -> torch.Tensor:
    nope, rope = x[..., :448], x[..., 448:]
    return torch.cat([fp8_round_trip(nope, 64, True), rope.bfloat16().to(x.dtype)], -1)


def index_vector(x: torch.Tensor) -> torch.Tensor:
    return fp8_round_trip(x @ hadamard(128), 128, False)


def rounding_rotary(rotary):
    """Keys are rotated just before they are stored; queries of the main attention stay bf16."""

    def rotate(x, cos, sin, unsqueeze_dim=1):
        out = rotary(x, cos, sin, unsqueeze_dim)
        if x.shape[-1] == 128:
            return index_vector(out)
        return stored_key(out) if x.shape[1] == 1 else out

    return rotate


@contextlib.contextmanager
def served_rounding(model: torch.nn.Module) -> Iterator[None]:
    """While open, `model` (several rows a forward, fp32) rounds like the server."""

    def quantise_input(_module, args):
        return (fp8_round_trip(args[0], 128, True), *args[1:])

    handles = [
        module.register_forward_pre_hook(quantise_input)
        for name, module in model.named_modules()
        if name.endswith(FP8_INPUT)
        and not name.endswith(("compressor.kv_proj", "compressor.gate_proj"))
        and ("indexer" not in name or name.endswith("q_b_proj"))
    ]
    rotary = hf.apply_rotary_pos_emb
    hf.apply_rotary_pos_emb = rounding_rotary(rotary)
    try:
        yield
    finally:
        hf.apply_rotary_pos_emb = rotary
        for handle in handles:
            handle.remove()
