"""DeepSeek-V4 configuration: what `config.json` says, checked once, typed from then on.

The kernels are written for one family of shapes (512-wide shared KV, 128-token window, four
residual streams, FP8 blocks of 128x128, MXFP4 experts). A checkpoint outside that family is
refused here, with the field's name, and never half-loads.
"""

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.target.checkpoint.formats import FP8_BLOCK, MXFP4_GROUP

COMPRESS_RATIOS = (0, 4, 128)  # window only, C4 (indexed), C128


class ConfigError(ValueError):
    """A configuration this package cannot serve; the message is one sentence naming the field."""


@dataclass(frozen=True)
class YarnConfig:
    """`rope_scaling` of the compressed layers; V4 applies no attention factor."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class DSparkConfig:
    """The draft model embedded in a DSpark checkpoint under `mtp.*`."""

    block_size: int  # gamma: tokens drafted per step
    noise_token_id: int  # fills rows 1.. of the draft block
    target_layer_ids: tuple[int, ...]  # layers whose outputs condition the draft, ascending
    markov_rank: int
    stages: int  # transformer blocks of the draft


@dataclass(frozen=True)
class ModelConfig:
    """Fields keep their `config.json` names; `yarn` and `dspark` group related ones."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    compress_ratios: tuple[int, ...]  # one entry per target layer: 0, 4 or 128
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    sliding_window: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int  # the first layers route by token id
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float  # ratio-0 layers and the draft, without YaRN
    compress_rope_theta: float  # ratio-4 and ratio-128 layers, with YaRN
    yarn: YarnConfig
    max_position_embeddings: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]  # each ends a text
    dspark: DSparkConfig | None  # None: no DSpark draft in this checkpoint

    @classmethod
    def from_hf(cls, config: Any, *, draft_stages: int | None = None) -> "ModelConfig":
        """Read a `config.json` dict or a transformers config object.

        SGLang parses V4 with DeepSeek-V3's class, which fills an absent field with V3's default;
        only `from_checkpoint` notices such an absence.

        Args:
            config: mapping, or object with the fields as attributes.
            draft_stages: number of `mtp.{i}.` prefixes in the checkpoint, where known.

        Raises:
            ConfigError: a field is missing, or has a value this package does not serve.
        """
        fields = Fields(config)
        _check_family(fields)
        layers = fields.positive("num_hidden_layers")
        ratios = fields.int_list("compress_ratios")
        built = cls(
            vocab_size=fields.positive("vocab_size"),
            hidden_size=fields.multiple_of("hidden_size", MXFP4_GROUP),
            num_hidden_layers=layers,
            compress_ratios=_target_ratios(ratios, layers),
            num_attention_heads=fields.positive("num_attention_heads"),
            head_dim=fields.exactly("head_dim", 512),
            qk_rope_head_dim=fields.exactly("qk_rope_head_dim", 64),
            q_lora_rank=fields.positive("q_lora_rank"),
            o_lora_rank=fields.positive("o_lora_rank"),
            o_groups=fields.positive("o_groups"),
            index_n_heads=fields.positive("index_n_heads"),
            index_head_dim=fields.exactly("index_head_dim", 128),
            index_topk=fields.positive("index_topk"),
            sliding_window=fields.exactly("sliding_window", 128),
            n_routed_experts=fields.positive("n_routed_experts"),
            num_experts_per_tok=fields.positive("num_experts_per_tok"),
            moe_intermediate_size=fields.multiple_of("moe_intermediate_size", MXFP4_GROUP),
            num_hash_layers=fields.integer("num_hash_layers"),
            routed_scaling_factor=fields.positive_number("routed_scaling_factor"),
            swiglu_limit=fields.positive_number("swiglu_limit"),
            hc_mult=fields.exactly("hc_mult", 4),
            hc_sinkhorn_iters=fields.positive("hc_sinkhorn_iters"),
            hc_eps=fields.positive_number("hc_eps"),
            rms_norm_eps=fields.positive_number("rms_norm_eps"),
            rope_theta=fields.positive_number("rope_theta"),
            compress_rope_theta=fields.positive_number("compress_rope_theta"),
            yarn=_yarn(fields),
            max_position_embeddings=fields.positive("max_position_embeddings"),
            bos_token_id=fields.integer("bos_token_id"),
            eos_token_ids=fields.token_ids("eos_token_id"),
            dspark=_dspark(fields, ratios, draft_stages),
        )
        _check_relations(built)
        return built

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> "ModelConfig":
        """Read `<path>/config.json` itself, and count the draft stages in the tensor index.

        Raises:
            ConfigError: also when the file is absent or not a JSON object.
        """
        file = Path(path) / "config.json"
        try:
            content = json.loads(file.read_text())
        except OSError as error:
            raise ConfigError(f"Cannot read {file}: {error.strerror}.") from error
        except ValueError as error:
            raise ConfigError(f"{file} is not valid JSON: {error}.") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{file} does not hold a JSON object.")
        return cls.from_hf(content, draft_stages=count_draft_stages(path))

    def is_hash_layer(self, layer: int) -> bool:
        """True where experts are looked up by token id instead of chosen by score."""
        return layer < self.num_hash_layers


def count_draft_stages(path: str | Path) -> int | None:
    """Number of `mtp.{i}.` prefixes in the safetensors index; None without a readable index."""
    try:
        index = json.loads((Path(path) / "model.safetensors.index.json").read_text())
        names = index["weight_map"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return len({name.split(".")[1] for name in names if name.startswith("mtp.")})


class Fields:
    """Typed access to a config, or to an object inside it, with one-sentence errors."""

    def __init__(self, source: Any, parent: str = ""):
        self._source = source
        self._parent = parent  # "quantization_config." inside that object

    def find(self, name: str) -> Any:
        """The value, or None where it is absent or null."""
        if isinstance(self._source, Mapping):
            return self._source.get(name)
        value = getattr(self._source, name, None)
        if value is None and name == "rope_theta":
            # transformers 5 moves the base into the rope parameters.
            value = (getattr(self._source, "rope_parameters", None) or {}).get(name)
        return value

    def get(self, name: str) -> Any:
        value = self.find(name)
        if value is None:
            raise ConfigError(f"config.json has no field {self._parent}{name}.")
        return value

    def require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(
                f"config.json: {self._parent}{name} must be {expected}, got {self.get(name)!r}."
            )

    def equals(self, name: str, allowed: Any) -> None:
        value = self.get(name)
        # In Python 1 == True, in a config file they are different answers.
        same_type = isinstance(value, bool) == isinstance(allowed, bool)
        self.require(name, same_type and value == allowed, repr(allowed))

    def integer(self, name: str) -> int:
        value = self.get(name)
        self.require(name, _is_int(value) and value >= 0, "an integer that is not negative")
        return value

    def positive(self, name: str) -> int:
        value = self.get(name)
        self.require(name, _is_int(value) and value >= 1, "a positive integer")
        return value

    def exactly(self, name: str, supported: int) -> int:
        self.require(name, self.positive(name) == supported, f"{supported}, as the kernels need")
        return supported

    def multiple_of(self, name: str, unit: int) -> int:
        value = self.positive(name)
        self.require(name, value % unit == 0, f"a multiple of {unit}")
        return value

    def positive_number(self, name: str) -> float:
        value = self.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        self.require(name, is_number and 0 < value < math.inf, "a positive number")
        return float(value)

    def int_list(self, name: str) -> tuple[int, ...]:
        value = self.get(name)
        is_list = isinstance(value, list | tuple) and all(map(_is_int, value))
        self.require(name, is_list, "a list of integers")
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of them."""
        value = self.get(name)
        ids = tuple(value) if isinstance(value, list | tuple) else (value,)
        fits = bool(ids) and all(_is_int(token) and token >= 0 for token in ids)
        self.require(name, fits, "a token id or a list of token ids")
        return ids

    def nested(self, name: str) -> "Fields":
        value = self.get(name)
        self.require(name, isinstance(value, Mapping), "an object")
        return Fields(value, f"{name}.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_family(fields: Fields) -> None:
    """Choices that other checkpoints make differently and our code does not parametrise."""
    fields.equals("model_type", "deepseek_v4")
    fields.equals("num_key_value_heads", 1)
    fields.equals("n_shared_experts", 1)
    fields.equals("scoring_func", "sqrtsoftplus")
    fields.equals("topk_method", "noaux_tc")
    fields.equals("norm_topk_prob", True)
    fields.equals("hidden_act", "silu")
    fields.equals("tie_word_embeddings", False)
    fields.equals("attention_bias", False)
    fields.equals("expert_dtype", "fp4")
    quantisation = fields.nested("quantization_config")
    quantisation.equals("quant_method", "fp8")
    quantisation.equals("fmt", "e4m3")
    quantisation.equals("scale_fmt", "ue8m0")
    quantisation.equals("activation_scheme", "dynamic")
    quantisation.equals("weight_block_size", [FP8_BLOCK, FP8_BLOCK])


def _target_ratios(ratios: tuple[int, ...], layers: int) -> tuple[int, ...]:
    if len(ratios) < layers:
        raise ConfigError(
            f"config.json: compress_ratios has {len(ratios)} entries for {layers} layers."
        )
    for layer, ratio in enumerate(ratios):
        allowed = COMPRESS_RATIOS if layer < layers else (0,)
        if ratio not in allowed:
            kind = "layer" if layer < layers else "draft stage"
            raise ConfigError(
                f"config.json: compress_ratios entry {layer} is {ratio}, a {kind} allows {allowed}."
            )
    return ratios[:layers]


def _yarn(fields: Fields) -> YarnConfig:
    scaling = fields.nested("rope_scaling")
    kind = scaling.find("type") or scaling.find("rope_type")
    if kind != "yarn":
        raise ConfigError(f"config.json: rope_scaling.type must be 'yarn', got {kind!r}.")
    return YarnConfig(
        factor=scaling.positive_number("factor"),
        beta_fast=scaling.positive_number("beta_fast"),
        beta_slow=scaling.positive_number("beta_slow"),
        original_max_position_embeddings=scaling.positive("original_max_position_embeddings"),
    )


def _dspark(fields: Fields, ratios: tuple[int, ...], stages: int | None) -> DSparkConfig | None:
    """`dspark_block_size` marks a DSpark draft; `num_nextn_predict_layers` is 1 either way."""
    if fields.find("dspark_block_size") is None:
        return None
    captured = fields.int_list("dspark_target_layer_ids")
    layers = fields.positive("num_hidden_layers")
    ascending = all(a < b for a, b in itertools.pairwise(captured))
    if not captured or not ascending or captured[0] < 0 or captured[-1] >= layers:
        raise ConfigError(
            f"config.json: dspark_target_layer_ids must ascend within 0..{layers - 1}, "
            f"got {list(captured)}."
        )
    noise, vocab = fields.integer("dspark_noise_token_id"), fields.positive("vocab_size")
    if noise >= vocab:
        raise ConfigError(
            f"config.json: dspark_noise_token_id {noise} is outside the vocabulary of {vocab}."
        )
    return DSparkConfig(
        block_size=fields.positive("dspark_block_size"),
        noise_token_id=noise,
        target_layer_ids=captured,
        markov_rank=fields.positive("dspark_markov_rank"),
        stages=stages or len(ratios) - layers or len(captured),
    )


def _check_relations(config: ModelConfig) -> None:
    if config.num_attention_heads % config.o_groups:
        raise ConfigError(
            f"config.json: o_groups {config.o_groups} does not divide "
            f"num_attention_heads {config.num_attention_heads}."
        )
    if config.num_experts_per_tok > config.n_routed_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok {config.num_experts_per_tok} exceeds "
            f"n_routed_experts {config.n_routed_experts}."
        )
    if config.num_hash_layers > config.num_hidden_layers:
        raise ConfigError(
            f"config.json: num_hash_layers {config.num_hash_layers} exceeds "
            f"num_hidden_layers {config.num_hidden_layers}."
        )
    special = [("bos_token_id", config.bos_token_id)]
    special += [("eos_token_id", token) for token in config.eos_token_ids]
    for name, token in special:
        if token >= config.vocab_size:
            raise ConfigError(
                f"config.json: {name} {token} is outside the vocabulary of {config.vocab_size}."
            )
