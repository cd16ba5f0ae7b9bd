"""Random weights whose draft agrees with the target as often as one asks for.

A random draft model accepts almost nothing, so nothing worth testing happens. Here target and
draft share a bigram: the first `dspark_markov_rank` columns of `head` are a matrix M, so a hidden
row that still looks like its token's embedding E predicts argmax(M @ E), and the Markov head
(w1 = E, w2 = M / 2) says the same. Sublayer outputs, scaled by `alpha`, perturb the target's
prediction by context the draft sees only in part: the larger alpha, the fewer drafts are accepted.

Every tensor is drawn from its own stream, seeded by its name, so it does not depend on the order
or the sharding of the file. Numbers come from a table of normal quantiles, already in the target
format: fast enough to write gigabytes, and the same bytes on every machine.
"""

import hashlib
import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from dspark.target.checkpoint.formats import E8M0_BIAS, encode_e2m1
from dspark.target.checkpoint.names import TORCH_DTYPE, TensorSpec
from dspark.target.config import ModelConfig

FP8_CODE_STD = 100.0  # 4.2 sigma, the last quantile, stays below 448
E2M1_CODE_STD = 2.5
# Neighbouring blocks differ in scale, so that a swapped or shifted scale changes the weights.
SCALE_OFFSETS = (-1, 0, 1)
SCALE_OFFSET_RMS = math.sqrt(sum(4.0**offset for offset in SCALE_OFFSETS) / len(SCALE_OFFSETS))
HEAD_NOISE = 0.05  # of the head columns that do not carry the bigram
SUBLAYER_OUTPUTS = ("wo_b", "w2")


class Recipe(NamedTuple):
    seed: int
    alpha: float  # strength of attention and experts against the residual stream


def random_tensor(name: str, spec: TensorSpec, config: ModelConfig, recipe: Recipe) -> torch.Tensor:
    """The tensor `name` of a checkpoint: CPU, dtype and shape as in `spec`."""
    stream = Stream(name, recipe.seed)
    module, _, leaf = name.rpartition(".")
    if spec.dtype in ("F8_E4M3", "I8"):
        return _quantised_codes(stream, spec, _gain(module, recipe))
    if spec.dtype == "F8_E8M0":
        return _block_scales(stream, spec, module, config, recipe)
    if leaf == "tid2eid":
        return _hash_table(stream, spec, config)
    if name in ("embed.weight", "head.weight") or "markov" in name:
        return _bigram_tensor(name, spec, config, recipe)
    if "hc_" in leaf:
        return _hyper(stream, spec, leaf)
    values = stream.normal(spec.shape, 1.0)
    if module.endswith("norm"):
        values = 1 + 0.1 * values
    elif leaf == "weight":
        values = values / math.sqrt(spec.shape[-1])
    elif leaf == "ape":
        values = 0.5 * values
    elif leaf == "bias":
        values = 0.1 * values
    return values.to(TORCH_DTYPE[spec.dtype])


class Stream:
    """Reproducible random numbers of one tensor."""

    def __init__(self, name: str, seed: int):
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        self._bits = np.random.SFC64(np.random.SeedSequence([seed, int.from_bytes(digest)]))

    def uint16(self, count: int) -> np.ndarray:
        return self._bits.random_raw(-(-count // 4)).view(np.uint16)[:count]

    def normal(self, shape: tuple[int, ...], std: float) -> torch.Tensor:
        """f32, standard deviation `std`."""
        table = _quantiles().float().numpy()
        values = np.take(table, self.uint16(math.prod(shape)))
        return torch.from_numpy(values).view(shape) * std

    def choice(self, shape: tuple[int, ...], options: tuple[int, ...]) -> torch.Tensor:
        """i32 picks from a few options."""
        picks = self.uint16(math.prod(shape)).astype(np.int32) % len(options)
        return torch.tensor(options, dtype=torch.int32)[torch.from_numpy(picks)].view(shape)


def _gain(module: str, recipe: Recipe) -> float:
    return recipe.alpha if module.endswith(SUBLAYER_OUTPUTS) else 1.0


def _base_exponent(dtype: str, columns: int, gain: float) -> int:
    """Middle scale exponent under which the code table comes out below its usual spread."""
    code_std = FP8_CODE_STD if dtype == "F8_E4M3" else E2M1_CODE_STD
    return math.ceil(math.log2(_weight_std(columns, gain) / code_std))


def _weight_std(columns: int, gain: float) -> float:
    return gain / math.sqrt(columns) / SCALE_OFFSET_RMS


def _quantised_codes(stream: Stream, spec: TensorSpec, gain: float) -> torch.Tensor:
    packed = spec.dtype == "I8"
    columns = spec.shape[1] * (2 if packed else 1)
    std = _weight_std(columns, gain) / 2.0 ** _base_exponent(spec.dtype, columns, gain)
    table = _mxfp4_pairs(std) if packed else _fp8_codes(std)
    codes = np.take(table, stream.uint16(math.prod(spec.shape)))
    return torch.from_numpy(codes).view(spec.shape).view(TORCH_DTYPE[spec.dtype])


def _block_scales(
    stream: Stream, spec: TensorSpec, module: str, config: ModelConfig, recipe: Recipe
) -> torch.Tensor:
    packed = ".experts." in module
    columns = _columns(module, config)
    middle = _base_exponent("I8" if packed else "F8_E4M3", columns, _gain(module, recipe))
    exponents = stream.choice(spec.shape, SCALE_OFFSETS) + (middle + E8M0_BIAS)
    return exponents.to(torch.uint8).view(torch.float8_e8m0fnu)


def _columns(module: str, config: ModelConfig) -> int:
    """Input width of a quantised matrix; its scale alone does not tell."""
    leaf = module.rpartition(".")[2]
    return {
        "wq_a": config.hidden_size,
        "wq_b": config.q_lora_rank,
        "wkv": config.hidden_size,
        "wo_a": config.num_attention_heads * config.head_dim // config.o_groups,
        "wo_b": config.o_groups * config.o_lora_rank,
        "main_proj": config.hidden_size
        * (len(config.dspark.target_layer_ids) if config.dspark else 0),
        "w1": config.hidden_size,
        "w2": config.moe_intermediate_size,
        "w3": config.hidden_size,
    }[leaf]


def _hash_table(stream: Stream, spec: TensorSpec, config: ModelConfig) -> torch.Tensor:
    """[vocab, k] distinct experts of each token."""
    tokens, k = spec.shape
    keys = stream.normal((tokens, config.n_routed_experts), 1.0)
    return keys.argsort(dim=1, stable=True)[:, :k].contiguous()


def _hyper(stream: Stream, spec: TensorSpec, leaf: str) -> torch.Tensor:
    """Streams mostly keep to themselves, every gate is open half way and moves with the input."""
    if leaf.endswith("_scale"):
        return torch.full(spec.shape, 0.3)
    if leaf.endswith("_fn"):
        return stream.normal(spec.shape, 1 / math.sqrt(spec.shape[1]))
    base = stream.normal(spec.shape, 0.1)
    if spec.shape == (24,):
        base[8:] += 4 * torch.eye(4).flatten()
    return base


def _bigram_tensor(
    name: str, spec: TensorSpec, config: ModelConfig, recipe: Recipe
) -> torch.Tensor:
    rank = config.dspark.markov_rank if config.dspark else config.hidden_size // 4
    if name == "embed.weight" or name.endswith("markov_w1.weight"):
        values = _embedding(config, recipe, rank)[:, : spec.shape[1]]
    elif name == "head.weight":
        values = Stream(name, recipe.seed).normal(spec.shape, HEAD_NOISE)
        values[:, :rank] = _bigram(config, recipe, rank)
    else:
        values = _bigram(config, recipe, rank) / 2
    return values.to(torch.bfloat16).contiguous()


def _embedding(config: ModelConfig, recipe: Recipe, rank: int) -> torch.Tensor:
    """f32 [vocab, hidden]."""
    shape = (config.vocab_size, config.hidden_size)
    values = Stream("embed.weight", recipe.seed).normal(shape, 1.0)
    if config.dspark:
        # The noise token predicts nothing by itself: later block rows rely on the Markov head.
        values[config.dspark.noise_token_id, :rank] = 0
    return values


def _bigram(config: ModelConfig, recipe: Recipe, rank: int) -> torch.Tensor:
    """f32 [vocab, rank]: the row of a token is the embedding of the one before it.

    All ordinary tokens form one cycle. Special tokens get zero rows: the model never ends a
    sequence by itself, so a test decides how many tokens it wants.
    """
    special = {config.bos_token_id, *config.eos_token_ids}
    if config.dspark:
        special.add(config.dspark.noise_token_id)
    order = Stream("cycle", recipe.seed).normal((config.vocab_size,), 1.0).argsort(stable=True)
    cycle = order[[int(token) not in special for token in order]]
    rows = torch.zeros(config.vocab_size, rank)
    rows[cycle.roll(-1)] = _embedding(config, recipe, rank)[cycle, :rank]
    return rows


@lru_cache
def _quantiles() -> torch.Tensor:
    """f64 [65536] equally likely values of a standard normal."""
    return torch.special.ndtri((torch.arange(65536, dtype=torch.float64) + 0.5) / 65536)


@lru_cache
def _fp8_codes(std: float) -> np.ndarray:
    """u8 [65536] e4m3 codes."""
    return (_quantiles() * std).float().to(torch.float8_e4m3fn).view(torch.uint8).numpy()


@lru_cache
def _mxfp4_pairs(std: float) -> np.ndarray:
    """u8 [65536] bytes of two independent E2M1 codes, from 8 random bits each."""
    normals = torch.special.ndtri((torch.arange(256, dtype=torch.float64) + 0.5) / 256)
    codes = encode_e2m1(normals * std)
    return (codes[None, :] | (codes[:, None] << 4)).flatten().numpy()
