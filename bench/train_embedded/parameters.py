"""Trained tensors: which there are, how they start, and what the forward pass sees of them.

Masters are f32 under their checkpoint names, except that the experts of a layer are stacked
(`ffn.experts.w13` [E, 2I, D], gate rows first, and `ffn.experts.w2` [E, D, I]). `prepare` rounds
them to the served format and casts them, once a step.
"""

import math
from collections.abc import Callable, Iterator

import torch

from dspark.bench.train_embedded.linear import Numerics
from dspark.bench.train_embedded.quantise import bf16_weight, fp8_weight, mxfp4_weight
from dspark.target.checkpoint.names import Table, draft_tensors, target_tensors
from dspark.target.config import ModelConfig

Weights = dict[str, torch.Tensor]
# Choosing experts is not differentiable: these follow the load, not a gradient.
UNTRAINED = (".ffn.gate.bias", ".ffn.gate.tid2eid")
EXPERTS = ("ffn.experts.w13", "ffn.experts.w2")


def init_target(config: ModelConfig, seed: int) -> Weights:
    return _init(target_tensors(config), config, seed)


def init_draft(config: ModelConfig, seed: int) -> Weights:
    return _init(draft_tensors(config), config, seed)


def trained(name: str) -> bool:
    return not name.endswith(UNTRAINED)


def block_prefixes(weights: Weights) -> list[str]:
    """`layers.0.`, ... or `mtp.0.`, ... in order."""
    numbers = {tuple(n.split(".")[:2]) for n in weights if n.startswith(("layers.", "mtp."))}
    return [f"{kind}.{number}." for kind, number in sorted(numbers, key=lambda n: int(n[1]))]


def below(weights: Weights, prefix: str) -> Weights:
    """The tensors under a prefix, by the rest of their names."""
    return {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}


def prepare(weights: Weights, numerics: Numerics, quantised: bool) -> Weights:
    """Masters to what the forward pass multiplies; gradients pass straight through.

    Matrices become `numerics.dtype`; gates, norms, sinks and hyper-connections stay f32. The two
    input matrices of the shared expert are joined, and `.weight` is dropped from the names.
    """
    ready: Weights = {}
    for name, master in weights.items():
        value = _served_value(name, master) if quantised and trained(name) else master
        if value.is_floating_point() and not _stays_f32(name):
            value = value.to(numerics.dtype)
        ready[name.removesuffix(".weight")] = value
    for name in [n for n in ready if n.endswith("shared_experts.w1")]:
        joined = torch.cat((ready.pop(name), ready.pop(name[:-1] + "3")))
        ready[name[:-1] + "13"] = joined
    return ready


def storage(name: str) -> str:
    """'fp8', 'mxfp4', 'bf16' or 'f32': how the checkpoint stores a master."""
    if name.endswith(EXPERTS):
        return "mxfp4"
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if ".compressor." not in name and leaf in _FP8_LEAVES:
        return "fp8"
    return "bf16" if name.endswith(".weight") else "f32"


_FP8_LEAVES = {"wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "main_proj"}
_ROUND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp8": fp8_weight,
    "mxfp4": mxfp4_weight,
    "bf16": bf16_weight,
    "f32": lambda weight: weight,
}


def _served_value(name: str, master: torch.Tensor) -> torch.Tensor:
    return _ROUND[storage(name)](master)


def _stays_f32(name: str) -> bool:
    return storage(name) == "f32" or name.endswith(("norm.weight", "gate.weight"))


def _init(table: Table, config: ModelConfig, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _initial(name, shape, config, generator).requires_grad_(trained(name))
        for name, shape in _masters(table, config)
    }


def _masters(table: Table, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = config.hidden_size, config.moe_intermediate_size
    count = config.n_routed_experts
    for name, spec in table.items():
        if name.endswith(".ffn.gate.weight"):
            prefix = name.removesuffix("ffn.gate.weight")
            yield f"{prefix}ffn.experts.w13", (count, 2 * width, hidden)
            yield f"{prefix}ffn.experts.w2", (count, hidden, width)
        if ".experts." not in name and spec.dtype != "F8_E8M0":
            yield name, spec.shape


def _initial(
    name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator
) -> torch.Tensor:
    def normal(std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if leaf == "tid2eid":
        return torch.rand(shape[0], config.n_routed_experts, generator=generator).argsort(1)[
            :, : shape[1]
        ]
    if leaf.startswith("hc_"):
        return _initial_hyper(name, leaf, shape, normal)
    if leaf in ("norm", "attn_norm", "ffn_norm", "q_norm", "kv_norm", "main_norm"):
        return torch.ones(shape)
    # A sublayer starts by adding nothing, a head by preferring nothing.
    zero = ("bias", "attn_sink", "ape", "wo_b", "w2", "head", "markov_w2", "confidence_head.proj")
    if name.removesuffix(".weight").endswith(zero):
        return torch.zeros(shape)
    if leaf in ("embed", "markov_w1"):
        return normal(0.3)
    return normal(1 / math.sqrt(shape[-1]))


def _initial_hyper(
    name: str, leaf: str, shape: tuple[int, ...], normal: Callable[[float], torch.Tensor]
) -> torch.Tensor:
    """Streams mostly keep to themselves; each site reads mainly one and writes unevenly to all."""
    if leaf.endswith("_scale"):
        return torch.full(shape, 0.1)
    if leaf.endswith("_fn"):
        return normal(1 / math.sqrt(shape[1]))
    base = normal(0.3)
    if shape == (24,):
        layer = int(name.split(".")[1])
        base[:4] = -1.0
        base[(2 * layer + ("ffn" in leaf)) % 4] = 1.0
        base[8:] += 4 * torch.eye(4).flatten()
    return base
